use iop_credential_lease::IssuerKey;
use iop_edge_core::token::{Token, TokenKind};

use super::*;
use crate::config::NodeOptions;
use crate::config::node::DialOptions;
use crate::renew::LOOK_EVERY;
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
    let files =
        NodeFiles::read(&settings(&dir, &format!("[\"file:issuer.pub\", \"{fixed}\"]")), NodeMetrics::new()).unwrap();
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
        let files = NodeFiles::read(&settings(&dir, text), NodeMetrics::new()).unwrap();
        assert_eq!(format!("{:?}", files.issuers()), expected);
        assert!(files.tls().is_none(), "no TLS is spoken");
    }
}

#[tokio::test(start_paused = true)]
async fn a_running_node_looks_by_itself() {
    // CRD-8, CRD-10
    let dir = TestDir::new();
    let [(one, _), (two, two_key)] = [public_key(), public_key()];
    dir.write("issuer.pub", &one);
    let metrics = NodeMetrics::new();
    let files = NodeFiles::read(&settings(&dir, "[\"file:issuer.pub\"]"), metrics.clone()).unwrap();
    let LeaseIssuers::Only(own) = files.issuers() else { panic!("{files:?}") };
    let keeping = tokio::spawn(files.keep(EdgeCheck::default(), Hangup::new().unwrap()));
    for (text, result) in [(&two[..], "applied"), ("no key", "refused")] {
        dir.write("issuer.pub", text);
        tokio::time::sleep(LOOK_EVERY + Duration::from_secs(1)).await;
        let line = format!("iop_node_file_reloads_total{{what=\"lease_issuers\",result=\"{result}\"}} 1\n");
        // The clock stands still while the file is read on another thread.
        assert!(metrics.render().contains(&line), "{}", metrics.render());
        assert!(own.get().ids().eq(TrustedIssuers::new([two_key]).unwrap().ids()));
    }
    keeping.abort();
}

#[test]
fn an_edge_whose_certificate_ends_soon_is_asked_for_another_one_now_and_then() {
    // CRD-10
    let certificate = |days: i64| {
        let mut params = rcgen::CertificateParams::new(vec!["edge".to_owned()]).unwrap();
        params.not_before = rcgen::date_time_ymd(2026, 1, 1);
        params.not_after = params.not_before + Duration::from_secs(days.unsigned_abs() * 86_400);
        params.self_signed(&rcgen::KeyPair::generate().unwrap()).unwrap().der().to_vec()
    };
    let began = 1_767_225_600;
    let after =
        |days: u64, seconds: u64| UnixTime::since_unix_epoch(Duration::from_secs(began + days * 86_400 + seconds));
    let mut leaf = EdgeLeaf::default();
    assert_eq!(leaf.renew_within(after(0, 0)), None, "nothing is known");
    leaf.shown = certificate(90);
    assert_eq!(leaf.renew_within(after(80, 0)), None);
    assert_eq!(leaf.renew_within(after(82, 0)), Some(RENEW_WITHIN));
    leaf.asked(after(82, 0));
    // Whichever it is: two Edges behind one name may have one each.
    leaf.shown = certificate(90);
    assert_eq!(leaf.renew_within(after(85, 86_399)), None, "it has no other one yet");
    assert_eq!(leaf.renew_within(after(86, 0)), Some(RENEW_WITHIN));
    assert_eq!(leaf.renew_within(after(89, 86_300)), Some(Duration::from_secs(50)));
    assert_eq!(leaf.renew_within(after(89, 86_399)), None, "it is too late");
    assert_eq!(leaf.renew_within(after(91, 0)), None);
}
