//! One Edge, one Node and a lease between them, all fixed.

use zeroize::Zeroizing;

use crate::lease::Entropy;
use crate::{
    AdmissionProof, Binding, Claims, Grant, IssuerKey, KeyId, LeaseError, LeaseId, MemoryReplayStore, NodeName,
    NodeView, OpenedCredential, PrincipalName, ProfileName, ProviderCredential, RecipientKey, RecipientPublicKey,
    RouteName, RunName, SealedLease, SlotName, SlotState, SlotStatus, SlotTable, TargetName, TimePolicy,
    TrustedIssuers, UpstreamOrigin, verify,
};

pub(crate) const NOW: u64 = 1_800_000_000_000;
pub(crate) const TTL: u64 = 60_000;
pub(crate) const GENERATION: u64 = 0x1122_3344_5566_7788;
pub(crate) const REVISION: u64 = 7;

/// The place on a provider that opening asks for.
pub(crate) struct Place;
impl AdmissionProof for Place {}

pub(crate) fn binding() -> Binding {
    Binding {
        principal: PrincipalName::new("team-a").unwrap(),
        route: RouteName::new("default").unwrap(),
        slot: SlotName::new("acme-main").unwrap(),
        profile: ProfileName::new("bearer").unwrap(),
        target: TargetName::new("large-1").unwrap(),
        node: NodeName::new("gpu-7").unwrap(),
        upstream: UpstreamOrigin::of("https", "api.example.com", 443).unwrap(),
        run: RunName::new("run_00112233445566778899aabbccddeeff").unwrap(),
    }
}

pub(crate) fn slots(revision: u64, status: SlotStatus) -> SlotTable {
    let mut table = SlotTable::default();
    table.replace([(binding().slot, SlotState { revision, status })]).unwrap();
    table
}

pub(crate) struct Fixture {
    pub(crate) issuer: IssuerKey,
    pub(crate) key: RecipientKey,
    pub(crate) issuers: TrustedIssuers,
    pub(crate) slots: SlotTable,
    pub(crate) replay: MemoryReplayStore,
}

impl Fixture {
    pub(crate) fn new() -> Self {
        let issuer = IssuerKey::from_seed(&[1; 32]);
        Self {
            issuers: TrustedIssuers::new([issuer.public_bytes()]).unwrap(),
            issuer,
            key: RecipientKey::from_seed(&[2; 32]),
            slots: slots(REVISION, SlotStatus::Enabled),
            replay: MemoryReplayStore::default(),
        }
    }

    pub(crate) fn recipient(&self) -> RecipientPublicKey {
        RecipientPublicKey::new(*self.key.public_bytes()).unwrap()
    }

    pub(crate) fn view(&self) -> NodeView<'_> {
        NodeView {
            now_ms: Some(NOW),
            policy: TimePolicy::default(),
            issuers: &self.issuers,
            recipient: self.key.id(),
            generation: GENERATION,
            slots: &self.slots,
        }
    }

    pub(crate) fn claims(&self) -> Claims {
        Claims {
            issuer: self.issuer.id(),
            recipient: self.key.id(),
            id: LeaseId([3; 16]),
            issued_at_ms: NOW,
            expires_at_ms: NOW + TTL,
            revision: REVISION,
            generation: GENERATION,
            binding: binding(),
        }
    }

    pub(crate) fn lease(&self) -> SealedLease {
        self.lease_of(&ProviderCredential::bearer(b"sk-example").unwrap(), binding())
    }

    pub(crate) fn lease_of(&self, credential: &ProviderCredential, binding: Binding) -> SealedLease {
        let recipient = self.recipient();
        let grant = Grant { recipient: &recipient, generation: GENERATION, revision: REVISION, binding, ttl_ms: TTL };
        let entropy = Entropy { id: [3; 16], seed: Zeroizing::new([4; 32]) };
        self.issuer.issue_with(&grant, credential, NOW, &entropy).unwrap().lease
    }

    /// A lease that says these things, sealed and signed as if the Edge had meant them.
    pub(crate) fn lease_with(&self, change: impl FnOnce(&mut Claims)) -> SealedLease {
        let mut claims = self.claims();
        change(&mut claims);
        let credential = ProviderCredential::bearer(b"sk-example").unwrap();
        let bytes = self.issuer.seal_and_sign(&claims, &self.recipient(), credential.plaintext(), &[4; 32]).unwrap();
        SealedLease::new(bytes).unwrap()
    }

    /// A lease of these bytes, correctly signed, whatever they are.
    pub(crate) fn signed(&self, unsigned: &[u8]) -> SealedLease {
        signed_by(&self.issuer, unsigned)
    }

    /// Both phases.
    pub(crate) fn use_up(&self, lease: &SealedLease) -> Result<OpenedCredential, LeaseError> {
        verify(lease, &binding(), &self.view())?.open(&self.key, &self.view(), &self.replay, &Place)
    }

    pub(crate) fn refusal(&self, lease: &SealedLease) -> Option<LeaseError> {
        self.use_up(lease).err()
    }
}

pub(crate) fn signed_by(issuer: &IssuerKey, unsigned: &[u8]) -> SealedLease {
    let signature = issuer.sign(&crate::format::signed_text(unsigned));
    SealedLease::new([unsigned, &signature].concat()).unwrap()
}

pub(crate) fn unsigned(lease: &SealedLease) -> Vec<u8> {
    lease.as_bytes()[..lease.as_bytes().len() - 64].to_vec()
}

pub(crate) fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<_> = text.bytes().filter(|byte| !byte.is_ascii_whitespace()).collect();
    digits.chunks(2).map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap()).collect()
}

pub(crate) fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The first issuer's id with another last byte: a stranger.
pub(crate) fn stranger(id: KeyId) -> KeyId {
    let mut bytes = *id.as_bytes();
    bytes[15] ^= 1;
    KeyId(bytes)
}
