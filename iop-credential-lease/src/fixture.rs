//! One Edge, one Node and what a lease between them says, all fixed: for tests and fuzz targets.

use crate::{
    AdmissionProof, Binding, Claims, IssuerKey, LeaseError, LeaseId, MemoryReplayStore, NodeName, NodeView,
    OpenedCredential, PrincipalName, ProfileName, RecipientKey, RecipientPublicKey, RouteName, RunName, SealedLease,
    SlotName, SlotState, SlotStatus, SlotTable, TargetName, TimePolicy, TrustedIssuers, UpstreamOrigin, verify,
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

/// Both ends, and what the Node knows.
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

    /// Both phases.
    pub(crate) fn use_up(&self, lease: &SealedLease) -> Result<OpenedCredential, LeaseError> {
        verify(lease, &binding(), &self.view())?.open(&self.key, &self.view(), &self.replay, &Place)
    }
}
