//! Decides what must hold for any lease that arrives. Fuzz targets: plain functions.
#![allow(
    clippy::panic,
    clippy::unwrap_used,
    clippy::missing_panics_doc,
    reason = "a panic is how a target reports; keys here are fixed and secret to nobody"
)]

use std::cell::RefCell;

use crate::fixture::{Fixture, binding};
use crate::{Claims, LeaseError, LeaseId, MemoryReplayStore, ProviderCredential, SealedLease, format, verify};

thread_local! {
    static WORLD: RefCell<Fixture> = RefCell::new(Fixture::new());
}

/// Bytes as they come from a peer: nobody but the issuer makes a lease that passes (CRD-4, CRD-5).
pub fn lease_verify(data: &[u8]) {
    let Ok(lease) = SealedLease::new(data.to_vec()) else { return };
    WORLD.with_borrow(|world| {
        let verified = verify(&lease, &binding(), &world.view());
        // A signature can't be guessed: what passes is what the corpus has.
        if verified.is_ok() {
            let (unsigned, _) = format::split_signature(data).unwrap();
            assert_eq!(format::parse(data).unwrap().claims.binding, binding());
            assert!(unsigned.len() < data.len());
            return;
        }
        // The rest of the reading is behind the signature: signed as if the Edge had meant it.
        let Ok((unsigned, _)) = format::split_signature(data) else { return };
        let signature = world.issuer.sign(&format::signed_text(unsigned));
        let signed = SealedLease::new([unsigned, &signature].concat()).unwrap();
        if let Err(error) = verify(&signed, &binding(), &world.view()) {
            assert_ne!(error, LeaseError::BadSignature);
        }
    });
}

/// What is inside of a correctly signed lease: a credential that can stand in a header, or nothing.
pub fn lease_open(data: &[u8]) {
    let (mode, data) = data.split_first().map_or((0, data), |(mode, rest)| (*mode, rest));
    WORLD.with_borrow_mut(|world| {
        if world.replay.len() > 50_000 {
            world.replay = MemoryReplayStore::default();
        }
        let mut id = [0; 16];
        id.iter_mut().zip(data).for_each(|(to, from)| *to = *from);
        let claims = Claims { id: LeaseId(id), ..world.claims() };
        let recipient = world.recipient();
        let before = world.replay.len();
        let bytes = if mode & 1 == 0 {
            // Any plaintext, sealed and signed rightly.
            match world.issuer.seal_and_sign(&claims, &recipient, data, &[4; 32]) {
                Ok(bytes) => bytes,
                Err(_) => return,
            }
        } else {
            // Any bytes where the sealed part is, signed rightly.
            let credential = ProviderCredential::bearer(b"sk-example").unwrap();
            let mut bytes = world.issuer.seal_and_sign(&claims, &recipient, credential.plaintext(), &[4; 32]).unwrap();
            let end = format::parse(&bytes).unwrap().claims_end;
            bytes.truncate(end);
            bytes.extend_from_slice(data);
            let signature = world.issuer.sign(&format::signed_text(&bytes));
            bytes.extend_from_slice(&signature);
            bytes
        };
        let Ok(lease) = SealedLease::new(bytes) else { return };
        let first = world.use_up(&lease);
        if let Ok(opened) = &first {
            let value = opened.expose();
            let legal = |byte: &u8| *byte == b' ' || byte.is_ascii_graphic();
            assert!(!value.is_empty() && value.iter().all(legal), "it can stand in a header");
        }
        // A lease is used at most once, whatever came of it.
        let again = world.use_up(&lease);
        assert!(again.is_err());
        assert!(world.replay.len() <= before + 1);
    });
}
