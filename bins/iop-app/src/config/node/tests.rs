use iop_edge_core::token::{Token, TokenKind};

use super::*;

fn token() -> Redacted<String> {
    Redacted::new(Token::generate(TokenKind::Node).unwrap().reveal())
}

fn load(edge: &str, change: impl FnOnce(&mut NodeOptions)) -> (Option<NodeSettings>, String) {
    let mut options = NodeOptions { token: Some(token()), ..NodeOptions::default() };
    options.dial.edge = Some(edge.to_owned());
    change(&mut options);
    let (settings, problems) = options.load();
    (settings, problems.to_string())
}

#[test]
fn where_to_connect_and_which_name_to_expect_are_separate_settings() {
    // CFG-4
    let (settings, problems) = load("https://edge.example", |options| {
        options.dial.dial_address = Some("10.0.0.7:9000".to_owned());
        options.dial.tls_name = Some("iop.internal".to_owned());
    });
    let edge = settings.unwrap_or_else(|| panic!("{problems}")).edge;
    assert_eq!((edge.tls, edge.dial.as_str(), edge.tls_name.as_str()), (true, "10.0.0.7:9000", "iop.internal"));
    let (settings, _) = load("https://[::1]:1", |_| {});
    let edge = settings.unwrap().edge;
    assert_eq!((edge.dial.as_str(), edge.tls_name.as_str()), ("[::1]:1", "::1"));
    let (settings, _) = load("https://edge.example", |_| {});
    assert_eq!(settings.unwrap().edge.dial, "edge.example:8443");
}

#[test]
fn plaintext_goes_to_this_machine_only_unless_somebody_says_so() {
    // BIN-6
    for (edge, dial, fine) in [
        ("http://127.0.0.1:8443", None, true),
        ("http://localhost:8443", None, true),
        ("http://[::1]:8443", None, true),
        ("http://edge.example:8443", Some("127.0.0.1:1"), true),
        ("http://edge.example:8443", None, false),
        ("http://10.0.0.1:8443", None, false),
        ("http://127.0.0.1:8443", Some("edge.example:8443"), false),
        ("http://localhost.example:8443", None, false),
    ] {
        for insecure in [false, true] {
            let (settings, problems) = load(edge, |options| {
                options.dial.dial_address = dial.map(ToOwned::to_owned);
                options.dial.insecure_plaintext = insecure;
            });
            assert_eq!(settings.is_some(), fine || insecure, "{edge} {dial:?} {insecure}: {problems}");
            assert!(fine || insecure || problems.contains("--insecure-plaintext"), "{problems}");
        }
    }
}

#[test]
fn flags_beat_the_file_and_the_file_beats_the_defaults() {
    // CFG-4
    let dir = crate::testdir::TestDir::new();
    let token = token();
    dir.write("node.token", &format!("{}\n", token.expose()));
    let config = dir.write(
        "node.yaml",
        "edge: https://file.example\ntoken_file: node.token\nreconnect: { max_attempts: 0, interval_sec: 7 }\nallow_upstream: [ private ]\nmetrics: { listen: 127.0.0.1:9191 }\n",
    );
    let options = NodeOptions { config: Some(config.clone()), ..NodeOptions::default() };
    let (settings, problems) = options.load();
    let settings = settings.unwrap_or_else(|| panic!("{problems}"));
    assert_eq!(settings.edge.dial, "file.example:8443");
    assert_eq!(settings.token.expose(), token.expose());
    assert_eq!((settings.max_attempts, settings.interval), (Some(0), Some(Duration::from_secs(7))));
    assert_eq!(settings.metrics, Some("127.0.0.1:9191".parse().unwrap()));

    let flags = NodeOptions {
        config: Some(config),
        dial: DialOptions { edge: Some("https://flag.example:1".to_owned()), ..DialOptions::default() },
        reconnect_max_attempts: Some(3),
        allow_upstream: vec!["loopback".to_owned()],
        ..NodeOptions::default()
    };
    let settings = flags.load().0.unwrap();
    assert_eq!(settings.edge.dial, "flag.example:1");
    assert_eq!((settings.max_attempts, settings.interval), (Some(3), Some(Duration::from_secs(7))));
}

#[test]
fn the_journal_is_on_unless_somebody_says_no_and_each_setting_has_a_flag() {
    // NOD-7, CFG-4
    let token = token();
    let (settings, problems) = load("https://e", |options| options.token = Some(token.clone()));
    let journal = settings.unwrap_or_else(|| panic!("{problems}")).journal.unwrap();
    assert_eq!(journal.dsn, "file:iop.db?cache=shared&mode=rwc");
    assert_eq!((journal.max_rows, journal.max_age.as_secs()), (100_000, 30 * 86_400));
    assert_eq!(journal.node, token.expose()[5..13], "the public part of the token and nothing more");

    let dir = crate::testdir::TestDir::new();
    dir.write("node.token", token.expose());
    let from = |journal: &str, change: fn(&mut NodeOptions)| {
        let config = dir.write("node.yaml", &format!("edge: https://e\ntoken_file: node.token\njournal: {journal}\n"));
        let mut options = NodeOptions { config: Some(config), ..NodeOptions::default() };
        change(&mut options);
        let (settings, problems) = options.load();
        (settings.map(|settings| settings.journal), problems.to_string())
    };
    let file = "{ dsn: /var/lib/iop/runs.db, max_rows: 5, max_age_days: 2 }";
    let journal = from(file, |_| {}).0.unwrap().unwrap();
    assert_eq!((journal.dsn.as_str(), journal.max_rows), ("/var/lib/iop/runs.db", 5));
    assert_eq!(journal.max_age, Duration::from_secs(2 * 86_400));
    let flags = |options: &mut NodeOptions| {
        options.journal_dsn = Some("other.db".to_owned());
        options.journal_max_rows = Some(7);
        options.journal_max_age_days = Some(1);
    };
    let journal = from(file, flags).0.unwrap().unwrap();
    assert_eq!((journal.dsn.as_str(), journal.max_rows, journal.max_age), ("other.db", 7, Duration::from_secs(86_400)));
    assert_eq!(from("{ enabled: false }", |_| {}).0, Some(None));
    assert_eq!(from("{ enabled: true }", |options| options.journal_enabled = Some(false)).0, Some(None));
    assert!(from("{ enabled: false }", |options| options.journal_enabled = Some(true)).0.unwrap().is_some());
    for (journal, words) in [("{ max_rows: 0 }", "3:"), ("{ max_age_days: 99999 }", "36500"), ("{ dns: x }", "`dsn`")] {
        let (settings, problems) = from(journal, |_| {});
        assert!(settings.is_none() && problems.contains(words), "{problems}");
    }
    let (settings, problems) = load("https://e", |options| options.journal_max_rows = Some(0));
    assert!(settings.is_none() && problems.contains("journal.max_rows"), "{problems}");
}

#[test]
fn mistakes_are_told_with_the_next_step_and_no_token() {
    // BIN-4, CFG-4
    let dir = crate::testdir::TestDir::new();
    let key = Token::generate(TokenKind::ApiKey).unwrap().reveal();
    let wrong = dir.write("wrong.token", &key);
    for (change, words) in [
        (
            Box::new(|o: &mut NodeOptions| o.dial.edge = None) as Box<dyn FnOnce(&mut NodeOptions)>,
            vec!["--edge https://"],
        ),
        (
            Box::new(|o: &mut NodeOptions| o.dial.edge = Some("edge.example:8443".to_owned())),
            vec!["https://edge.example:8443"],
        ),
        (Box::new(|o: &mut NodeOptions| o.token = None), vec!["--token-file"]),
        (
            Box::new(move |o: &mut NodeOptions| {
                o.token = None;
                o.dial.token_file = Some(wrong);
            }),
            vec!["API key of a client", "iopn_"],
        ),
        (Box::new(|o: &mut NodeOptions| o.dial.ca = Some("nowhere.pem".into())), vec!["nowhere.pem"]),
        (Box::new(|o: &mut NodeOptions| o.allow_upstream = vec!["http://x".to_owned()]), vec!["`http://x`"]),
        (
            Box::new(|o: &mut NodeOptions| o.metrics_listen = Some("0.0.0.0:1".parse().unwrap())),
            vec!["0.0.0.0:1", "listen on 127.0.0.1"],
        ),
    ] {
        let (settings, problems) = load("https://edge.example", change);
        assert!(settings.is_none());
        for word in words {
            assert!(problems.contains(word), "{word}: {problems}");
        }
        assert!(!problems.contains(&key[14..]), "{problems}");
    }
}

#[test]
fn a_plain_token_in_the_file_is_an_error_in_its_line() {
    // CFG-4
    let dir = crate::testdir::TestDir::new();
    let secret = token();
    let config = dir.write("node.yaml", &format!("edge: https://e\ntoken: {}\n", secret.expose()));
    let problems = NodeOptions { config: Some(config), ..NodeOptions::default() }.load().1.to_string();
    assert!(problems.contains("node.yaml:2:1") && problems.contains("token_file"), "{problems}");
    assert!(!problems.contains(&secret.expose()[14..]), "{problems}");
}

#[test]
fn one_mistake_in_the_file_does_not_hide_or_invent_others() {
    // BIN-4
    let dir = crate::testdir::TestDir::new();
    dir.write("node.token", token().expose());
    let config = dir.write(
        "node.yaml",
        "edge: https://e\ntoken_file: node.token\ntls: { ca: 7 }\nreconect: { max_attempts: 0 }\nallow_upstream: [ \"http://x\" ]\n",
    );
    let (settings, problems) = NodeOptions { config: Some(config), ..NodeOptions::default() }.load();
    assert!(settings.is_none());
    let lines: Vec<_> = problems.sorted().iter().map(|problem| problem.at.line).collect();
    assert_eq!(lines, [3, 4, 5], "{problems}");
    assert!(problems.to_string().contains("did you mean `reconnect`?"), "{problems}");
}
