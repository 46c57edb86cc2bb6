//! The vectors of Project Wycheproof for each primitive, with the counts they must have.

use chacha20poly1305::aead::{Aead, Payload};
use chacha20poly1305::{ChaCha20Poly1305, KeyInit};
use ed25519_dalek::{Signature, VerifyingKey};
use hkdf::Hkdf;
use hpke::Deserializable;
use sha2::Sha256;
use wycheproof::{TestResult, aead, eddsa, hkdf as hkdf_vectors, xdh};
use x25519_dalek::{PublicKey, StaticSecret};

use crate::suite;
use crate::{RecipientPublicKey, WeakRecipientKey};

#[test]
fn ed25519_is_strict() {
    // CRD-14
    let set = eddsa::TestSet::load(eddsa::TestName::Ed25519).unwrap();
    let mut count = 0;
    for group in set.test_groups {
        let public = <[u8; 32]>::try_from(&group.key.pk[..]).unwrap();
        let key = VerifyingKey::from_bytes(&public).unwrap();
        for test in group.tests {
            let signature = Signature::from_slice(&test.sig);
            let valid = signature.is_ok_and(|signature| key.verify_strict(&test.msg, &signature).is_ok());
            assert_eq!(valid, test.result == TestResult::Valid, "{}: {}", test.tc_id, test.comment);
            count += 1;
        }
    }
    assert_eq!(count, 151);
}

#[test]
fn x25519_agrees_and_a_shared_secret_of_zeros_is_refused() {
    // CRD-14
    let set = xdh::TestSet::load(xdh::TestName::X25519).unwrap();
    let (mut count, mut zeros) = (0, 0);
    for test in set.test_groups.into_iter().flat_map(|group| group.tests) {
        let private = <[u8; 32]>::try_from(&test.private_key[..]).unwrap();
        let public = <[u8; 32]>::try_from(&test.public_key[..]).unwrap();
        let shared = StaticSecret::from(private).diffie_hellman(&PublicKey::from(public));
        assert_eq!(shared.as_bytes()[..], test.shared_secret[..], "{}: {}", test.tc_id, test.comment);
        let refused = *shared.as_bytes() == [0; 32];
        assert_eq!(RecipientPublicKey::new(public).err(), refused.then_some(WeakRecipientKey), "{}", test.tc_id);
        if refused {
            let key = suite::PrivateKey::from_bytes(&private).unwrap();
            assert!(suite::open(&key, &public, &[], &[], &[0; 16]).is_none(), "{}", test.tc_id);
            zeros += 1;
        }
        count += 1;
    }
    assert_eq!((count, zeros), (518, 31));
}

#[test]
fn chacha20_poly1305_seals_and_refuses() {
    // CRD-14
    let set = aead::TestSet::load(aead::TestName::ChaCha20Poly1305).unwrap();
    let mut count = 0;
    for test in set.test_groups.into_iter().filter(|group| group.nonce_size == 96).flat_map(|group| group.tests) {
        let cipher = ChaCha20Poly1305::new_from_slice(&test.key).unwrap();
        let nonce = <[u8; 12]>::try_from(&test.nonce[..]).unwrap().into();
        let sealed = [&test.ct[..], &test.tag].concat();
        let opened = cipher.decrypt(&nonce, Payload { msg: &sealed, aad: &test.aad });
        match test.result {
            TestResult::Invalid => assert!(opened.is_err(), "{}: {}", test.tc_id, test.comment),
            TestResult::Valid | TestResult::Acceptable => {
                assert_eq!(opened.unwrap()[..], test.pt[..], "{}", test.tc_id);
                let again = cipher.encrypt(&nonce, Payload { msg: &test.pt, aad: &test.aad }).unwrap();
                assert_eq!(again, sealed, "{}", test.tc_id);
            }
        }
        count += 1;
    }
    assert_eq!(count, 316);
}

#[test]
fn hkdf_sha256_expands() {
    // CRD-14
    let set = hkdf_vectors::TestSet::load(hkdf_vectors::TestName::HkdfSha256).unwrap();
    let mut count = 0;
    for test in set.test_groups.into_iter().flat_map(|group| group.tests) {
        let hkdf = Hkdf::<Sha256>::new(Some(&test.salt), &test.ikm);
        let mut out = vec![0; test.size];
        let expanded = hkdf.expand(&test.info, &mut out).is_ok();
        assert_eq!(expanded, test.result == TestResult::Valid, "{}: {}", test.tc_id, test.comment);
        assert!(!expanded || out == test.okm[..], "{}", test.tc_id);
        count += 1;
    }
    assert_eq!(count, 86);
}
