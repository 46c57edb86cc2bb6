use iop_credential_lease::IssuerKey;
use iop_edge_core::token::{Token, TokenKind};

use super::*;
use crate::config::NodeOptions;
use crate::config::node::DialOptions;
use crate::testdir::TestDir;

/// `ed25519:` and the key in hex, and the key.
fn public_key() -> (String, [u8; 32]) {
    let key = IssuerKey::generate().unwrap().public_bytes();
    let hex: String = key.iter().map(|byte| format!("{byte:02x}")).collect();
    (format!("ed25519:{hex}"), key)
}

fn settings(dir: &TestDir, lease_issuers: &str) -> NodeSettings {
    let options = NodeOptions {
        config: Some(dir.write("node.yaml", &format!("lease_issuers: {lease_issuers}\n"))),
        dial: DialOptions {
            edge: Some("http://127.0.0.1:9".to_owned()),
            token_file: Some(dir.write("token", &Token::generate(TokenKind::Node).unwrap().reveal())),
            ..DialOptions::default()
        },
        ..NodeOptions::default()
    };
    let (settings, problems) = options.load();
    settings.unwrap_or_else(|| panic!("{problems}"))
}

#[test]
fn issuers_in_files_are_read_again_and_a_bad_file_changes_nothing() {
    // CRD-8
    let dir = TestDir::new();
    let [(one, one_key), (two, two_key), (fixed, fixed_key)] = [public_key(), public_key(), public_key()];
    dir.write("issuer.pub", &one);
    let files = NodeFiles::read(&settings(&dir, &format!("[\"file:issuer.pub\", \"{fixed}\"]"))).unwrap();
    let LeaseIssuers::Only(own) = files.issuers() else { panic!("{files:?}") };
    let trusted = |keys: [[u8; 32]; 2]| TrustedIssuers::new(keys).unwrap().ids().collect::<Vec<_>>();
    let now = || own.get().ids().collect::<Vec<_>>();
    let check = EdgeCheck::default();
    assert_eq!(now(), trusted([one_key, fixed_key]));
    for (text, expected) in [(&two[..], two_key), ("no key", two_key), (&one[..], one_key)] {
        dir.write("issuer.pub", text);
        files.look(&check, false);
        assert_eq!(now(), trusted([expected, fixed_key]), "{text}");
    }
}

#[test]
fn who_names_no_files_reads_none() {
    // CRD-8
    let dir = TestDir::new();
    for (text, expected) in [("[]", "Nobody"), ("[edge]", "OfEdge")] {
        let files = NodeFiles::read(&settings(&dir, text)).unwrap();
        assert_eq!(format!("{:?}", files.issuers()), expected);
        assert!(files.tls().is_none(), "no TLS is spoken");
    }
}
