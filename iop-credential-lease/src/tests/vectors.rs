//! The vectors of the RFCs, through the code that seals and signs leases where it can be reached.

use chacha20poly1305::aead::{Aead, Payload};
use chacha20poly1305::{ChaCha20Poly1305, KeyInit};
use ed25519_dalek::{Signature, Signer, SigningKey, VerifyingKey};
use hkdf::Hkdf;
use hpke::{Deserializable, Kem as _, Serializable};
use sha2::Sha256;
use x25519_dalek::{PublicKey, StaticSecret};

use super::support::hex;
use crate::TrustedIssuers;
use crate::suite::{self, Kem};

fn array<const N: usize>(text: &str) -> [u8; N] {
    hex(text).try_into().unwrap()
}

#[test]
fn hpke_is_that_of_rfc_9180_a_2_1() {
    // CRD-14
    let public: [u8; 32] = array("4310ee97d88cc1f088a5576c77ab0cf5c3ac797f3d95139c6c84b5429c59662a");
    let enc = array("1afa08d3dec047a643885163f1180476fa7ddb54c6a8029ea33f95796bf2ac4a");
    let seed = array("909a9b35d3dc4713a5e72a4da274b55d3d3821a37e5d099e74a647db583a904b");
    let (info, aad) = (hex("4f6465206f6e2061204772656369616e2055726e"), hex("436f756e742d30"));
    let plaintext = b"Beauty is truth, truth beauty";
    let sealed = hex("1c5250d8034ec2b784ba2cfd69dbdb8af406cfe3ff938e131f0def8c8b60b4db21993c62ce81883d2dd1b51a28");
    let to = suite::PublicKey::from_bytes(&public).unwrap();
    assert_eq!(suite::seal(&to, &info, &aad, plaintext, &seed), Some((enc, sealed.clone())));

    let (private, derived) =
        Kem::derive_keypair(&hex("1ac01f181fdf9f352797655161c58b75c656a6cc2716dcb66372da835542e1df"));
    assert_eq!(derived.to_bytes().as_slice(), public);
    assert_eq!(suite::open(&private, &enc, &info, &aad, &sealed).unwrap().as_slice(), plaintext);
    assert!(suite::open(&private, &enc, &info, b"Count-1", &sealed).is_none());
    assert!(suite::open(&private, &enc, b"", &aad, &sealed).is_none());
}

#[test]
fn ed25519_is_that_of_rfc_8032_7_1() {
    // CRD-14
    let vectors = [
        (
            "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
            "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
            "",
            "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b",
        ),
        (
            "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
            "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
            "72",
            "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00",
        ),
        (
            "c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7",
            "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
            "af82",
            "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac18ff9b538d16f290ae67f760984dc6594a7c15e9716ed28dc027beceea1ec40a",
        ),
    ];
    for (secret, public, message, signature) in vectors {
        let key = SigningKey::from_bytes(&array(secret));
        assert_eq!(key.verifying_key().to_bytes(), array(public));
        assert_eq!(key.sign(&hex(message)).to_bytes(), array(signature));
        let public = VerifyingKey::from_bytes(&array(public)).unwrap();
        assert!(public.verify_strict(&hex(message), &Signature::from_bytes(&array(signature))).is_ok());
    }
}

#[test]
fn ed25519_takes_the_strict_side_of_every_known_disagreement() {
    // CRD-14: the twelve cases of Chalkias, Garillot and Nikolaenko, "Taming the many EdDSAs", table 6.
    #[derive(Debug, PartialEq)]
    enum Verdict {
        /// The key is not trusted at all.
        Key,
        Signature,
        Taken,
    }
    let cases = [
        (
            Verdict::Key,
            "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac03fa",
            "8c93255d71dcab10e8f379c26200f3c7bd5f09d9bc3068d3ef4edeb4853022b6",
            "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a0000000000000000000000000000000000000000000000000000000000000000",
        ),
        (
            Verdict::Key,
            "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac03fa",
            "9bd9f44f4dcc75bd531b56b2cd280b0bb38fc1cd6d1230e14861d861de092e79",
            "f7badec5b8abeaf699583992219b7b223f1df3fbbea919844e3f7c554a43dd43a5bb704786be79fc476f91d3f3f89b03984d8068dcf1bb7dfc6637b45450ac04",
        ),
        (
            Verdict::Signature,
            "f7badec5b8abeaf699583992219b7b223f1df3fbbea919844e3f7c554a43dd43",
            "aebf3f2601a0c8c5d39cc7d8911642f740b78168218da8471772b35f9d35b9ab",
            "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac03fa8c4bd45aecaca5b24fb97bc10ac27ac8751a7dfe1baff8b953ec9f5833ca260e",
        ),
        (
            Verdict::Taken,
            "cdb267ce40c5cd45306fa5d2f29731459387dbf9eb933b7bd5aed9a765b88d4d",
            "9bd9f44f4dcc75bd531b56b2cd280b0bb38fc1cd6d1230e14861d861de092e79",
            "9046a64750444938de19f227bb80485e92b83fdb4b6506c160484c016cc1852f87909e14428a7a1d62e9f22f3d3ad7802db02eb2e688b6c52fcd6648a98bd009",
        ),
        (
            Verdict::Signature,
            "cdb267ce40c5cd45306fa5d2f29731459387dbf9eb933b7bd5aed9a765b88d4d",
            "e47d62c63f830dc7a6851a0b1f33ae4bb2f507fb6cffec4011eaccd55b53f56c",
            "160a1cb0dc9c0258cd0a7d23e94d8fa878bcb1925f2c64246b2dee1796bed5125ec6bc982a269b723e0668e540911a9a6a58921d6925e434ab10aa7940551a09",
        ),
        (
            Verdict::Signature,
            "cdb267ce40c5cd45306fa5d2f29731459387dbf9eb933b7bd5aed9a765b88d4d",
            "e47d62c63f830dc7a6851a0b1f33ae4bb2f507fb6cffec4011eaccd55b53f56c",
            "21122a84e0b5fca4052f5b1235c80a537878b38f3142356b2c2384ebad4668b7e40bc836dac0f71076f9abe3a53f9c03c1ceeeddb658d0030494ace586687405",
        ),
        (
            Verdict::Signature,
            "442aad9f089ad9e14647b1ef9099a1ff4798d78589e66f28eca69c11f582a623",
            "85e241a07d148b41e47d62c63f830dc7a6851a0b1f33ae4bb2f507fb6cffec40",
            "e96f66be976d82e60150baecff9906684aebb1ef181f67a7189ac78ea23b6c0e547f7690a0e2ddcd04d87dbc3490dc19b3b3052f7ff0538cb68afb369ba3a514",
        ),
        (
            Verdict::Signature,
            "442aad9f089ad9e14647b1ef9099a1ff4798d78589e66f28eca69c11f582a623",
            "85e241a07d148b41e47d62c63f830dc7a6851a0b1f33ae4bb2f507fb6cffec40",
            "8ce5b96c8f26d0ab6c47958c9e68b937104cd36e13c33566acd2fe8d38aa19427e71f98a473474f2f13f06f97c20d58cc3f54b8bd0d272f42b695dd7e89a8c22",
        ),
        (
            Verdict::Signature,
            "f7badec5b8abeaf699583992219b7b223f1df3fbbea919844e3f7c554a43dd43",
            "9bedc267423725d473888631ebf45988bad3db83851ee85c85e241a07d148b41",
            "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff03be9678ac102edcd92b0210bb34d7428d12ffc5df5f37e359941266a4e35f0f",
        ),
        (
            Verdict::Signature,
            "f7badec5b8abeaf699583992219b7b223f1df3fbbea919844e3f7c554a43dd43",
            "9bedc267423725d473888631ebf45988bad3db83851ee85c85e241a07d148b41",
            "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffca8c5b64cd208982aa38d4936621a4775aa233aa0505711d8fdcfdaa943d4908",
        ),
        (
            Verdict::Key,
            "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff",
            "e96b7021eb39c1a163b6da4e3093dcd3f21387da4cc4572be588fafae23c155b",
            "a9d55260f765261eb9b84e106f665e00b867287a761990d7135963ee0a7d59dca5bb704786be79fc476f91d3f3f89b03984d8068dcf1bb7dfc6637b45450ac04",
        ),
        (
            Verdict::Key,
            "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff",
            "39a591f5321bbe07fd5a23dc2f39d025d74526615746727ceefd6e82ae65c06f",
            "a9d55260f765261eb9b84e106f665e00b867287a761990d7135963ee0a7d59dca5bb704786be79fc476f91d3f3f89b03984d8068dcf1bb7dfc6637b45450ac04",
        ),
    ];
    for (n, (verdict, key, message, signature)) in cases.into_iter().enumerate() {
        let issuers = TrustedIssuers::new([array(key)]);
        let found = match issuers {
            Err(_) => Verdict::Key,
            Ok(issuers) => {
                let id = issuers.ids().next().unwrap();
                let taken = issuers.signed(id, &hex(message), &array(signature)).unwrap();
                if taken { Verdict::Taken } else { Verdict::Signature }
            }
        };
        assert_eq!(found, verdict, "case {n}");
    }
}

#[test]
fn x25519_is_that_of_rfc_7748() {
    // CRD-14: 5.2 and 6.1
    let vectors = [
        (
            "a546e36bf0527c9d3b16154b82465edd62144c0ac1fc5a18506a2244ba449ac4",
            "e6db6867583030db3594c1a424b15f7c726624ec26b3353b10a903a6d0ab1c4c",
            "c3da55379de9c6908e94ea4df28d084f32eccf03491c71f754b4075577a28552",
        ),
        (
            "4b66e9d4d1b4673c5ad22691957d6af5c11b6421e0ea01d42ca4169e7918ba0d",
            "e5210f12786811d3f4b7959d0538ae2c31dbe7106fc03c3efc4cd549c715a493",
            "95cbde9476e8907d7aade45cb4b873f88b595a68799fa152e6f8f7647aac7957",
        ),
    ];
    for (secret, point, shared) in vectors {
        let secret = StaticSecret::from(array::<32>(secret));
        let shared_here = secret.diffie_hellman(&PublicKey::from(array::<32>(point)));
        assert_eq!(shared_here.to_bytes(), array(shared));
    }
    let keys = [
        (
            "77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a",
            "8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a",
        ),
        (
            "5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb",
            "de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f",
        ),
    ];
    let [alice, bob] = keys.map(|(secret, public)| {
        let secret = StaticSecret::from(array::<32>(secret));
        assert_eq!(PublicKey::from(&secret).to_bytes(), array(public));
        secret
    });
    let shared = array("4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742");
    assert_eq!(alice.diffie_hellman(&PublicKey::from(&bob)).to_bytes(), shared);
    assert_eq!(bob.diffie_hellman(&PublicKey::from(&alice)).to_bytes(), shared);
}

#[test]
fn chacha20_poly1305_is_that_of_rfc_8439_2_8_2() {
    // CRD-14
    let key: [u8; 32] = std::array::from_fn(|n| 0x80 + u8::try_from(n).unwrap());
    let nonce: [u8; 12] = array("070000004041424344454647");
    let aad = hex("50515253c0c1c2c3c4c5c6c7");
    let text = b"Ladies and Gentlemen of the class of '99: If I could offer you only one tip for the future, sunscreen would be it.";
    let sealed = hex("d31a8d34648e60db7b86afbc53ef7ec2a4aded51296e08fea9e2b5a736ee62d6\
         3dbea45e8ca9671282fafb69da92728b1a71de0a9e060b2905d6a5b67ecd3b36\
         92ddbd7f2d778b8c9803aee328091b58fab324e4fad675945585808b4831d7bc\
         3ff4def08e4b7a9de576d26586cec64b61161ae10b594f09e26a7e902ecbd0600691");
    let cipher = ChaCha20Poly1305::new(&key.into());
    assert_eq!(cipher.encrypt(&nonce.into(), Payload { msg: text, aad: &aad }).unwrap(), sealed);
    assert_eq!(cipher.decrypt(&nonce.into(), Payload { msg: &sealed, aad: &aad }).unwrap(), text);
}

#[test]
fn hkdf_is_that_of_rfc_5869_a_1() {
    // CRD-14
    let hkdf = Hkdf::<Sha256>::new(Some(&hex("000102030405060708090a0b0c")), &[0x0b; 22]);
    let mut out = [0; 42];
    hkdf.expand(&hex("f0f1f2f3f4f5f6f7f8f9"), &mut out).unwrap();
    let expected = "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865";
    assert_eq!(out, array(expected));
}
