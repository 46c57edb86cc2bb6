//! The vectors of the RFCs, through the code that seals and signs leases where it can be reached.

use chacha20poly1305::aead::{Aead, Payload};
use chacha20poly1305::{ChaCha20Poly1305, KeyInit};
use ed25519_dalek::{Signature, Signer, SigningKey, VerifyingKey};
use hkdf::Hkdf;
use hpke::{Deserializable, Kem as _, Serializable};
use sha2::Sha256;
use x25519_dalek::{PublicKey, StaticSecret};

use super::support::hex;
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
