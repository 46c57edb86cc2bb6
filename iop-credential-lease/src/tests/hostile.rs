//! Leases that somebody changed, and leases that a trusted issuer signed without meaning well.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::support::*;
use crate::format::{parse, read_issuer};
use crate::{
    Binding, IssuerKey, LeaseError, LeaseId, NodeName, PrincipalName, ProfileName, ProviderCredential,
    RecipientPublicKey, RouteName, RunName, SealedLease, SlotName, TargetName, TrustedIssuers, UpstreamOrigin,
    WeakRecipientKey, verify,
};

/// All encodings of X25519 points whose order divides 8, below and above the field's prime.
const LOW_ORDER: [&str; 7] = [
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0100000000000000000000000000000000000000000000000000000000000000",
    "e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800",
    "5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157",
    "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
];

fn with_top_bit(mut point: [u8; 32]) -> [u8; 32] {
    point[31] |= 0x80;
    point
}

fn low_order() -> impl Iterator<Item = [u8; 32]> {
    LOW_ORDER.into_iter().flat_map(|point| {
        let point = hex(point).try_into().unwrap();
        [point, with_top_bit(point)]
    })
}

#[test]
fn every_single_bit_counts() {
    // CRD-14, CRD-1
    let all = Fixture::new();
    let good = all.lease();
    let mut refusals: BTreeMap<LeaseError, usize> = BTreeMap::new();
    for bit in 0..good.as_bytes().len() * 8 {
        let mut bytes = good.as_bytes().to_vec();
        bytes[bit / 8] ^= 1 << (bit % 8);
        let error = all.refusal(&SealedLease::new(bytes).unwrap());
        *refusals.entry(error.unwrap_or_else(|| panic!("opened with bit {bit} flipped"))).or_default() += 1;
    }
    let bits = good.as_bytes().len() * 8;
    assert_eq!(
        refusals.into_iter().collect::<Vec<_>>(),
        [
            (LeaseError::Malformed, 32),
            (LeaseError::UnsupportedVersion, 16),
            (LeaseError::UnknownIssuer, 128),
            (LeaseError::BadSignature, bits - 176),
        ]
    );
    assert!(all.replay.is_empty(), "what is not signed can't fill the store");
    assert!(all.use_up(&good).is_ok());
}

#[test]
fn no_part_of_a_lease_and_no_more_than_a_lease_passes() {
    // CRD-14
    let all = Fixture::new();
    let good = all.lease();
    for length in 1..good.as_bytes().len() {
        assert!(all.refusal(&SealedLease::new(good.as_bytes().slice(..length)).unwrap()).is_some(), "{length}");
    }
    for more in [vec![0], vec![0; 64], good.as_bytes().to_vec()] {
        let longer = SealedLease::new([good.as_bytes(), &more[..]].concat()).unwrap();
        assert_eq!(all.refusal(&longer), Some(LeaseError::BadSignature));
    }
    assert!(all.replay.is_empty());
}

#[test]
fn a_signed_body_that_is_cut_extended_or_misspelled_is_malformed() {
    // CRD-14
    let all = Fixture::new();
    let good = unsigned(&all.lease());
    let claims_end = parse(all.lease().as_bytes()).unwrap().claims_end;
    for length in 0..good.len() {
        let lease = all.signed(&good[..length]);
        assert_eq!(all.refusal(&lease), Some(LeaseError::Malformed), "{length}");
    }
    for more in [1, 2, 256, 300] {
        let longer = all.signed(&[&good[..], &vec![0; more]].concat());
        assert_eq!(all.refusal(&longer), Some(LeaseError::Malformed), "{more}");
    }
    let changed = |at: usize, byte: u8| {
        let mut body = good.clone();
        body[at] = byte;
        all.refusal(&all.signed(&body))
    };
    // Length of the first name: none, one less, more than there is; then a byte no name may have.
    for length in [0, 5, 7, 255] {
        assert_eq!(changed(86, length), Some(LeaseError::Malformed), "length {length}");
    }
    for byte in (0..=0x20).chain(0x7f..=0xff) {
        assert_eq!(changed(87, byte), Some(LeaseError::Malformed), "byte {byte:#x}");
    }
    // Length of the ciphertext, two bytes.
    for (high, low) in [(0, 0), (0, 15), (0, 16), (1, 15), (1, 17), (2, 16), (0xff, 0xff)] {
        let mut body = good.clone();
        body[claims_end + 32..claims_end + 34].copy_from_slice(&[high, low]);
        assert_eq!(all.refusal(&all.signed(&body)), Some(LeaseError::Malformed), "{high} {low}");
    }
    assert!(all.replay.is_empty());
}

#[test]
fn a_ciphertext_has_1_to_32_whole_blocks() {
    // CRD-14
    let all = Fixture::new();
    let claims = all.claims();
    for (length, error) in [
        (0, LeaseError::Malformed),
        (255, LeaseError::Malformed),
        (257, LeaseError::Malformed),
        (256 * 32, LeaseError::OpenFailed),
        (256 * 33, LeaseError::Malformed),
    ] {
        let bytes = all.issuer.seal_and_sign(&claims, &all.recipient(), &vec![0; length], &[4; 32]).unwrap();
        let lease = SealedLease::new(bytes).unwrap();
        assert_eq!(all.refusal(&lease), Some(error), "{length}");
    }
}

#[test]
fn each_claim_changed_after_sealing_and_signed_again_does_not_open() {
    // CRD-14, CRD-2: the signature is genuine, the seal is bound to the old claims.
    let all = Fixture::new();
    let good = unsigned(&all.lease());
    let end = parse(all.lease().as_bytes()).unwrap().claims_end;
    // Lease id, the last byte of each time, and the revision, raised.
    for (n, at) in [39, 53, 61, 69, 77].into_iter().enumerate() {
        let mut body = good.clone();
        // A name of its own for each, or the second would be a used one.
        body[38] = u8::try_from(10 + n).unwrap();
        body[at] = body[at].wrapping_add(1);
        let lease = all.signed(&body);
        assert_eq!(verify(&lease, &binding(), &all.view()).err(), None, "byte {at}");
        assert_eq!(all.refusal(&lease), Some(LeaseError::OpenFailed), "byte {at}");
    }
    // A binding the Node would accept, over a seal made for another one.
    let other = Binding { run: RunName::new("run_11112233445566778899aabbccddeeff").unwrap(), ..binding() };
    let sealed_for_other = unsigned(&all.lease_of(&ProviderCredential::bearer(b"sk").unwrap(), other));
    let moved = all.signed(&[&good[..end], &sealed_for_other[end..]].concat());
    assert_eq!(all.refusal(&moved), Some(LeaseError::OpenFailed));
}

#[test]
fn another_trusted_issuer_can_not_take_over_a_lease() {
    // CRD-14: stripping the signature and signing again.
    let mut all = Fixture::new();
    let second = IssuerKey::from_seed(&[5; 32]);
    all.issuers = TrustedIssuers::new([all.issuer.public_bytes(), second.public_bytes()]).unwrap();
    let mut body = unsigned(&all.lease());
    assert_eq!(all.refusal(&signed_by(&second, &body)), Some(LeaseError::BadSignature), "the issuer is a claim");
    body[6..22].copy_from_slice(second.id().as_bytes());
    let taken = signed_by(&second, &body);
    assert_eq!(read_issuer(taken.as_bytes()), Ok(second.id()));
    assert!(verify(&taken, &binding(), &all.view()).is_ok());
    assert_eq!(all.refusal(&taken), Some(LeaseError::OpenFailed));
    assert!(all.use_up(&all.lease()).is_ok(), "the genuine one is another lease");
}

#[test]
fn a_lease_can_not_be_forwarded_to_another_connection() {
    // CRD-14, CRD-3
    let mut all = Fixture::new();
    let lease = all.lease();
    let other = crate::RecipientKey::from_seed(&[6; 32]);
    let mut body = unsigned(&lease);
    body[22..38].copy_from_slice(other.id().as_bytes());
    all.key = other;
    assert_eq!(all.refusal(&lease), Some(LeaseError::WrongRecipient));
    assert_eq!(all.refusal(&all.signed(&body)), Some(LeaseError::OpenFailed));
}

#[test]
fn a_point_of_low_order_is_no_recipient_and_no_encapsulated_key() {
    // CRD-14
    let all = Fixture::new();
    let good = unsigned(&all.lease());
    let end = parse(all.lease().as_bytes()).unwrap().claims_end;
    let mut id = 0;
    for point in low_order() {
        assert_eq!(RecipientPublicKey::new(point).unwrap_err(), WeakRecipientKey);
        let mut body = good.clone();
        id += 1;
        body[38..54].copy_from_slice(&[id; 16]);
        body[end..end + 32].copy_from_slice(&point);
        let lease = all.signed(&body);
        assert!(verify(&lease, &binding(), &all.view()).is_ok());
        assert_eq!(all.refusal(&lease), Some(LeaseError::OpenFailed));
    }
    assert_eq!(id, 14);
}

#[test]
fn a_plaintext_that_is_no_credential_has_the_same_refusal_as_one_that_does_not_decrypt() {
    // CRD-5
    let all = Fixture::new();
    let mut plaintexts = vec![vec![0; 256], vec![0xff; 256], [&[1, 0, 253][..], &[b'k'; 253]].concat()];
    plaintexts[2][255] = b'\n';
    plaintexts.push([&[2, 0, 5, 4][..], b"host", &[0; 248]].concat());
    for (n, plaintext) in plaintexts.iter().enumerate() {
        let mut claims = all.claims();
        claims.id = LeaseId([u8::try_from(n).unwrap(); 16]);
        let bytes = all.issuer.seal_and_sign(&claims, &all.recipient(), plaintext, &[4; 32]).unwrap();
        assert_eq!(all.refusal(&SealedLease::new(bytes).unwrap()), Some(LeaseError::OpenFailed), "{n}");
    }
}

fn name() -> impl Strategy<Value = String> {
    proptest::collection::vec(0x21..=0x7e_u8, 1..=255).prop_map(|bytes| String::from_utf8(bytes).unwrap())
}

fn any_binding() -> impl Strategy<Value = Binding> {
    [name(), name(), name(), name(), name(), name(), name(), name()].prop_map(|[a, b, c, d, e, f, g, h]| Binding {
        principal: PrincipalName::new(a).unwrap(),
        route: RouteName::new(b).unwrap(),
        slot: SlotName::new(c).unwrap(),
        profile: ProfileName::new(d).unwrap(),
        target: TargetName::new(e).unwrap(),
        node: NodeName::new(f).unwrap(),
        upstream: UpstreamOrigin::new(g).unwrap(),
        run: RunName::new(h).unwrap(),
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    /// CRD-1: one encoding for each content.
    #[test]
    fn what_is_read_is_what_was_written(
        binding in any_binding(), numbers in any::<[u64; 4]>(), ids in any::<[[u8; 16]; 3]>(), blocks in 1..=32_usize,
    ) {
        let all = Fixture::new();
        let mut claims = all.claims();
        claims.issuer = crate::KeyId(ids[0]);
        claims.recipient = crate::KeyId(ids[1]);
        claims.id = LeaseId(ids[2]);
        [claims.issued_at_ms, claims.expires_at_ms, claims.revision, claims.generation] = numbers;
        claims.binding = binding;
        let encoded = claims.encode();
        let sealed = vec![7; 16 + 256 * blocks];
        let whole = [&crate::format::join(encoded.clone(), &[9; 32], &sealed)[..], &[8; 64]].concat();
        let parsed = parse(&whole).unwrap();
        prop_assert_eq!(&parsed.claims, &claims);
        prop_assert_eq!(parsed.claims.encode(), encoded);
        prop_assert_eq!((parsed.enc, &whole[parsed.sealed.clone()]), ([9; 32], &sealed[..]));
        let again = [&crate::format::join(parsed.claims.encode(), &parsed.enc, &whole[parsed.sealed])[..], &[8; 64]];
        prop_assert_eq!(again.concat(), whole);
    }

    /// CRD-5: any bytes, signed by a trusted issuer, are refused or a lease; none makes it panic.
    #[test]
    fn any_signed_bytes_are_refused(mut body in proptest::collection::vec(any::<u8>(), 22..2_000)) {
        let all = Fixture::new();
        body[..6].copy_from_slice(b"IOPL\x01\x01");
        body[6..22].copy_from_slice(all.issuer.id().as_bytes());
        prop_assert_eq!(all.refusal(&all.signed(&body)), Some(LeaseError::Malformed));
        prop_assert!(all.refusal(&SealedLease::new(body).unwrap()).is_some());
    }
}
