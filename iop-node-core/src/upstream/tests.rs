use super::*;

fn verdict(list: &AllowUpstream, url: &str) -> &'static str {
    match list.check(url) {
        Ok(()) => "ok",
        Err(UpstreamRefused::Malformed) => "malformed",
        Err(UpstreamRefused::Never(_)) => "never",
        Err(UpstreamRefused::NotListed(_)) => "not listed",
    }
}

#[test]
fn by_default_loopback_and_private_addresses_and_nothing_else() {
    // CRD-6
    let list = AllowUpstream::default();
    for (url, want) in [
        ("http://127.0.0.1:8080", "ok"),
        ("http://127.9.9.9", "ok"),
        ("https://[::1]:11434/v1", "ok"),
        ("http://localhost:8000/v1", "ok"),
        ("http://LOCALHOST", "ok"),
        ("http://10.1.2.3", "ok"),
        ("http://172.31.255.255", "ok"),
        ("http://192.168.0.9:1", "ok"),
        ("http://[fd12::1]", "ok"),
        ("http://[::ffff:10.0.0.1]", "ok"),
        ("http://172.32.0.1", "not listed"),
        ("http://8.8.8.8", "not listed"),
        ("http://100.64.0.1", "not listed"),
        ("http://[2001:db8::1]", "not listed"),
        ("https://api.openai.com", "not listed"),
        ("http://localhost.evil.example", "not listed"),
        ("http://2130706433", "not listed"),
        ("http://0x7f.1", "not listed"),
    ] {
        assert_eq!(verdict(&list, url), want, "{url}");
    }
}

#[test]
fn link_local_and_metadata_are_never_allowed_even_when_listed() {
    // CRD-6
    let wide = AllowUpstream::parse([
        "0.0.0.0/0",
        "::/0",
        "169.254.169.254",
        "private",
        "loopback",
        "metadata.google.internal",
        "100.100.100.200",
    ])
    .unwrap();
    for url in [
        "http://169.254.169.254/latest",
        "http://169.254.0.1",
        "http://[fe80::1]",
        "http://[febf::1]",
        "http://[::ffff:169.254.169.254]",
        "http://[fd00:ec2::254]",
        "http://[fd20:ce::254]",
        "http://100.100.100.200",
        "http://192.0.0.192",
        "http://metadata.google.internal",
        "http://metadata.google.internal./",
        "http://0.0.0.0:80",
        "http://[::]",
        "http://224.0.0.1",
    ] {
        assert_eq!(verdict(&wide, url), "never", "{url}");
    }
    assert_eq!(verdict(&wide, "http://8.8.8.8"), "ok");
    assert!(!wide.allows_ip("169.254.1.1".parse().unwrap()));
}

#[test]
fn a_list_replaces_the_default_and_names_must_be_on_it() {
    // CRD-6
    let list = AllowUpstream::parse(["GPU-1.lan", "10.2.0.0/16", "2001:db8::/32", "203.0.113.7"]).unwrap();
    for (url, want) in [
        ("http://gpu-1.lan:8000", "ok"),
        ("http://GPU-1.LAN", "ok"),
        ("http://gpu-1.lan./", "ok"),
        ("http://gpu-2.lan", "not listed"),
        ("http://a.gpu-1.lan", "not listed"),
        ("http://10.2.255.1", "ok"),
        ("http://10.3.0.1", "not listed"),
        ("http://[2001:db8:ffff::1]", "ok"),
        ("http://[2001:db9::1]", "not listed"),
        ("http://203.0.113.7", "ok"),
        ("http://203.0.113.8", "not listed"),
        ("http://127.0.0.1", "not listed"),
        ("http://localhost", "not listed"),
    ] {
        assert_eq!(verdict(&list, url), want, "{url}");
    }
    for bad in ["", "http://x", "10.0.0.0/33", "a b", "10.0.0.0/x", "a..b", "*"] {
        assert!(AllowUpstream::parse([bad]).is_err(), "{bad}");
    }
}

#[test]
fn what_is_no_plain_origin_is_refused() {
    // SEC-1
    let list = AllowUpstream::default();
    for url in [
        "",
        "127.0.0.1:80",
        "/v1",
        "ftp://127.0.0.1",
        "file:///etc/passwd",
        "http://localhost@evil.example",
        "http://user:pw@127.0.0.1",
        "http://127.0.0.1/?key=SENTINEL",
        "http://127.0.0.1/#x",
        "http://127.0.0.1\\@evil.example",
        "http:///v1",
    ] {
        assert_eq!(verdict(&list, url), "malformed", "{url}");
        assert!(!list.check(url).unwrap_err().to_string().contains("SENTINEL"));
    }
}
