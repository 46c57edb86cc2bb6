//! Key files as people have them, and lists of issuers as they change.

use std::fs;
use std::path::PathBuf;

use super::*;
use crate::tests::support::*;
use crate::{LeaseError, NodeView, verify};

/// `openssl genpkey -algorithm ed25519`, of the seed of RFC 8032's first test.
const PEM: &str = "-----BEGIN PRIVATE KEY-----\n\
    MC4CAQAwBQYDK2VwBCIEIJ1hsZ3v/VpguoRK9JLsLMREScVpezJpGXA7rAMcrn9g\n\
    -----END PRIVATE KEY-----\n";

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("iop-lease-{}-{name}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn file(&self, name: &str, text: &str, mode: u32) -> PathBuf {
        let path = self.0.join(name);
        fs::write(&path, text).unwrap();
        #[cfg(unix)]
        fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn a_key_of_openssl_is_read_and_is_the_one_it_was() {
    // CRD-8
    let folder = Folder::new("read");
    let key = IssuerKey::load(&folder.file("issuer.pem", PEM, 0o600)).unwrap();
    assert_eq!(to_hex(&key.public_bytes()), "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a");
}

#[cfg(unix)]
#[test]
fn a_key_file_that_others_can_read_or_write_is_refused() {
    // CRD-8
    let folder = Folder::new("mode");
    for mode in [0o644, 0o640, 0o604, 0o620, 0o602, 0o601, 0o777] {
        let error = IssuerKey::load(&folder.file("issuer.pem", PEM, mode)).unwrap_err();
        assert!(matches!(error, KeyFileError::Mode(found) if found == mode), "{mode:o}: {error}");
        assert!(error.to_string().contains("chmod 600"));
    }
    for mode in [0o600, 0o400] {
        assert!(IssuerKey::load(&folder.file("issuer.pem", PEM, mode)).is_ok(), "{mode:o}");
        fs::remove_file(folder.0.join("issuer.pem")).unwrap();
    }
}

#[test]
fn what_is_no_key_file_is_refused_and_not_repeated() {
    // CRD-8, CRD-9
    let folder = Folder::new("bad");
    let other = PEM.replace("MC4CAQAwBQYDK2Vw", "MC4CAQAwBQYDK2Vu");
    let texts = ["", "SENTINEL", &PEM[..60], &other, &PEM.replace("PRIVATE", "PUBLIC")];
    for (n, text) in texts.into_iter().enumerate() {
        let error = IssuerKey::load(&folder.file(&format!("{n}.pem"), text, 0o600)).unwrap_err();
        assert!(matches!(error, KeyFileError::NotPem), "{n}");
        assert!(!format!("{error:?}{error}").contains("SENTINEL"));
    }
    let large = folder.file("large.pem", &format!("{PEM}{}", "\n".repeat(4_096)), 0o600);
    assert!(matches!(IssuerKey::load(&large), Err(KeyFileError::NotAKeyFile)));
    assert!(matches!(IssuerKey::load(&folder.0), Err(KeyFileError::NotAKeyFile | KeyFileError::Io(_))));
    assert!(matches!(IssuerKey::load(&folder.0.join("none.pem")), Err(KeyFileError::Io(_))));
}

#[test]
fn a_new_key_file_is_its_owners_only_and_replaces_none() {
    // CRD-8
    let folder = Folder::new("create");
    let path = folder.0.join("issuer.pem");
    let key = IssuerKey::create(&path).unwrap();
    assert_eq!(IssuerKey::load(&path).unwrap().id(), key.id(), "a mode that load takes");
    assert!(matches!(IssuerKey::create(&path), Err(KeyFileError::Io(_))));
    assert_eq!(IssuerKey::load(&path).unwrap().id(), key.id());
    assert_ne!(IssuerKey::create(&folder.0.join("other.pem")).unwrap().id(), key.id());
}

#[test]
fn weak_and_misspelled_issuer_keys_are_refused_when_loaded() {
    // CRD-8, CRD-14
    let weak = [
        "0100000000000000000000000000000000000000000000000000000000000000",
        "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "0000000000000000000000000000000000000000000000000000000000000000",
        "0000000000000000000000000000000000000000000000000000000000000080",
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc85",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac03fa",
    ];
    let bytes = |text: &str| <[u8; 32]>::try_from(hex(text)).unwrap();
    let good = IssuerKey::from_seed(&[1; 32]).public_bytes();
    for key in weak {
        assert_eq!(TrustedIssuers::new([good, bytes(key)]).unwrap_err(), UntrustedIssuer::Weak, "{key}");
    }
    // y = 2^255 - 16 is p + 3: another spelling of y = 3, a point of full order.
    let three = "0300000000000000000000000000000000000000000000000000000000000000";
    assert!(TrustedIssuers::new([bytes(three)]).is_ok());
    let spelled = "f0ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f";
    assert_eq!(TrustedIssuers::new([bytes(spelled)]).unwrap_err(), UntrustedIssuer::NotAKey);
    let off_the_curve = "0200000000000000000000000000000000000000000000000000000000000000";
    assert_eq!(TrustedIssuers::new([bytes(off_the_curve)]).unwrap_err(), UntrustedIssuer::NotAKey);
}

#[test]
fn eight_issuers_are_trusted_and_not_nine() {
    // CRD-8
    let key = |n| IssuerKey::from_seed(&[n; 32]).public_bytes();
    let eight = TrustedIssuers::new((1..=8).chain(1..=8).map(key)).unwrap();
    assert_eq!(eight.ids().count(), MAX_TRUSTED_ISSUERS);
    assert_eq!(TrustedIssuers::new((1..=9).map(key)).unwrap_err(), UntrustedIssuer::TooMany);
}

#[test]
fn keys_rotate_with_both_valid_in_between() {
    // CRD-8
    let old = Fixture::new();
    let new = Fixture { issuer: IssuerKey::from_seed(&[7; 32]), ..Fixture::new() };
    let (first, second) = (old.issuer.public_bytes(), new.issuer.public_bytes());
    let takes = |keys: &[[u8; 32]]| {
        let issuers = TrustedIssuers::new(keys.iter().copied()).unwrap();
        let view = NodeView { issuers: &issuers, ..old.view() };
        [old.lease(), new.lease()].map(|lease| verify(&lease, &binding(), &view).err())
    };
    assert_eq!(takes(&[first]), [None, Some(LeaseError::UnknownIssuer)]);
    assert_eq!(takes(&[first, second]), [None, None]);
    assert_eq!(takes(&[second]), [Some(LeaseError::UnknownIssuer), None]);
}
