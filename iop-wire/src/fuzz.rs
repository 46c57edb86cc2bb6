//! Decides what must hold for any bytes that a peer sends. Fuzz targets: plain functions (SEC-5).
#![allow(clippy::panic, clippy::unwrap_used, clippy::missing_panics_doc, reason = "a panic is how a target reports")]

use bytes::Bytes;

use crate::convert::{WireMessage, decode_nth};
use crate::link::LinkError;
use crate::message::{ToEdge, ToNode};

fn both_ways<M: WireMessage + PartialEq + std::fmt::Debug>(bytes: &Bytes) {
    match M::decode(bytes.clone()) {
        Ok(message) => {
            assert!(bytes.len() <= M::LIMIT);
            let seq = message.seq;
            // What was taken can be said again, and means the same. A request that is near the limit may be over it with
            // what its own side adds.
            match M::encode(message.clone()) {
                Ok(again) => {
                    let again = M::decode(again).unwrap();
                    assert_eq!((again.seq, &again.message), (seq, &message.message));
                }
                Err(error) => assert_eq!(error, LinkError::TooLarge),
            }
            // The opening is stricter, never laxer (REG-8).
            let opening: Result<_, LinkError> = decode_nth::<M>(1, bytes.clone());
            match opening {
                Ok(first) => assert_eq!(first.message, message.message),
                Err(error) => assert_eq!(error, LinkError::TooLarge),
            }
        }
        Err(LinkError::MalformedRun { run, .. }) => assert_ne!(run.0, 0, "W17: the run is known"),
        Err(LinkError::Malformed(_) | LinkError::TooLarge) => {}
        Err(other) => panic!("{other}"),
    }
}

/// Envelopes of both directions: decoded with every check, or refused with the right scope (WIR-4, WIR-15).
pub fn wire_decode(data: &[u8]) {
    let bytes = Bytes::copy_from_slice(data);
    both_ways::<ToEdge>(&bytes);
    both_ways::<ToNode>(&bytes);
}

/// A certificate in DER: read whole, or not at all; the identity in it stands in its bytes (CRD-10).
#[cfg(feature = "grpc")]
pub fn san_parse(data: &[u8]) {
    use crate::identity::WorkloadIdentity;
    use crate::link::grpc::certificate_identity;
    if let Ok(identity) = certificate_identity(data) {
        let text = identity.to_string();
        assert_eq!(WorkloadIdentity::parse(&text), Ok(identity));
        assert!(data.windows(text.len()).any(|window| window == text.as_bytes()));
    }
    if let Ok(text) = std::str::from_utf8(data)
        && let Ok(identity) = WorkloadIdentity::parse(text)
    {
        assert_eq!(identity.to_string(), text);
    }
}
