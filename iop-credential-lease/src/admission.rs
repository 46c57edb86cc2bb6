//! Decides who may open a lease: only the holder of a place on the provider it is meant for.

/// Proof that the holder owns a place on a provider, so that a secret is opened only for a call that will be made.
///
/// Opening a lease takes `&impl AdmissionProof` and happens as the last step before the provider call: a refusal for
/// lack of capacity must never burn a single-use lease or put a secret into memory.
///
/// Only a capacity permit implements this trait: a move-only value whose drop frees the place. Never implement it for a
/// unit type, a clonable type, or anything a request can bring along. The trait is not sealed because the permit lives
/// with the engine that owns the capacity, and this crate depends on no engine.
pub trait AdmissionProof {}

#[cfg(test)]
mod tests {
    use super::*;

    struct Permit;
    impl AdmissionProof for Permit {}

    #[test]
    fn a_permit_can_be_lent_as_proof() {
        // CRD-4
        fn needs_proof(_: &impl AdmissionProof) {}
        needs_proof(&Permit);
    }
}
