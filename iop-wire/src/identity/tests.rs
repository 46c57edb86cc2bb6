use proptest::prelude::*;

use super::*;

#[test]
fn an_identity_is_read_exactly_or_not_at_all() {
    // CRD-10
    let good = WorkloadIdentity::parse("spiffe://iop.local/iop/node/gpu-1").unwrap();
    assert_eq!((good.trust_domain().as_str(), good.role(), good.id()), ("iop.local", WorkloadRole::Node, "gpu-1"));
    assert_eq!(good.to_string(), "spiffe://iop.local/iop/node/gpu-1");
    assert!(WorkloadIdentity::parse("spiffe://a/iop/edge/E_2.x").is_ok());
    for text in [
        "",
        "spiffe://",
        "SPIFFE://iop.local/iop/node/a",
        "spiffe://IOP.local/iop/node/a",
        "spiffe:///iop/node/a",
        "spiffe://iop.local/node/a",
        "spiffe://iop.local/iop/node",
        "spiffe://iop.local/iop/node/",
        "spiffe://iop.local/iop/node/a/",
        "spiffe://iop.local/iop/node/a/b",
        "spiffe://iop.local/iop//a",
        "spiffe://iop.local/iop/admin/a",
        "spiffe://iop.local/iop/node/..",
        "spiffe://iop.local/iop/node/%61",
        "spiffe://iop.local/iop/node/a?x",
        "spiffe://iop.local/iop/node/a#x",
        "spiffe://iop.local:443/iop/node/a",
        "spiffe://user@iop.local/iop/node/a",
        "spiffe://iop.local/iop/node/a b",
        "spiffe://iop.local/iop/node/ä",
        "https://iop.local/iop/node/a",
        " spiffe://iop.local/iop/node/a",
    ] {
        assert_eq!(WorkloadIdentity::parse(text), Err(InvalidIdentity), "{text:?}");
    }
    assert!(WorkloadIdentity::parse(&format!("spiffe://{}/iop/node/a", "d".repeat(256))).is_err());
    assert!(WorkloadIdentity::parse(&format!("spiffe://d/iop/node/{}", "a".repeat(256))).is_err());
}

#[test]
fn what_proved_an_identity_is_not_printed() {
    // CRD-9
    let verified =
        VerifiedIdentity::vouched(WorkloadIdentity::parse("spiffe://d/iop/edge/e").unwrap(), [b"SENTINEL".to_vec()]);
    assert!(!format!("{verified:?}").contains("83, 69"));
    assert_eq!(verified.chain(), [b"SENTINEL".to_vec()]);
}

proptest! {
    #[test]
    fn whatever_is_read_prints_as_it_was(text in "(spiffe://)?[a-z./:-]{0,12}/iop/(edge|node)/[A-Za-z0-9._/%-]{0,8}") {
        // CRD-10
        if let Ok(identity) = WorkloadIdentity::parse(&text) {
            prop_assert_eq!(identity.to_string(), text);
        }
    }
}
