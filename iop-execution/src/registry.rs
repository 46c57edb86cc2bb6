//! Decides which adapter instance serves a key, and lets replaced ones finish what they run (EXE-14).

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::gate::CapacityGate;
use crate::id::{AdapterKey, ProviderId};
use crate::provider::Provider;

/// One registered adapter instance: the provider, its gate, and whether it takes new work.
#[derive(Debug)]
pub struct RegisteredProvider {
    provider_id: ProviderId,
    provider: Arc<dyn Provider>,
    gate: CapacityGate,
    draining: AtomicBool,
}

impl RegisteredProvider {
    /// The provider's id.
    #[must_use]
    pub const fn provider_id(&self) -> &ProviderId {
        &self.provider_id
    }

    /// The provider.
    #[must_use]
    pub const fn provider(&self) -> &Arc<dyn Provider> {
        &self.provider
    }

    /// Its places.
    #[must_use]
    pub const fn gate(&self) -> &CapacityGate {
        &self.gate
    }

    /// True if it takes no new work.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }
}

/// The adapter instances of one Node, by key. Whoever holds an instance keeps it alive, so replacing one lets its
/// running work finish.
#[derive(Debug, Default)]
pub struct ProviderRegistry {
    by_key: HashMap<AdapterKey, Arc<RegisteredProvider>>,
}

impl ProviderRegistry {
    /// No instance yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Registers an instance, or replaces the one with that key; gives the replaced one, which takes no new work.
    pub fn register(
        &mut self,
        key: AdapterKey,
        provider_id: ProviderId,
        provider: Arc<dyn Provider>,
        gate: CapacityGate,
    ) -> Option<Arc<RegisteredProvider>> {
        let entry = Arc::new(RegisteredProvider { provider_id, provider, gate, draining: AtomicBool::new(false) });
        let replaced = self.by_key.insert(key, entry);
        if let Some(old) = &replaced {
            old.draining.store(true, Ordering::Release);
        }
        replaced
    }

    /// Takes an instance out; it takes no new work.
    pub fn remove(&mut self, key: &AdapterKey) -> Option<Arc<RegisteredProvider>> {
        let old = self.by_key.remove(key)?;
        old.draining.store(true, Ordering::Release);
        Some(old)
    }

    /// Stops new work on an instance without removing it. Says whether there is one.
    pub fn drain(&self, key: &AdapterKey) -> bool {
        self.by_key.get(key).is_some_and(|entry| {
            entry.draining.store(true, Ordering::Release);
            true
        })
    }

    /// The instance with this key.
    #[must_use]
    pub fn by_key(&self, key: &AdapterKey) -> Option<&Arc<RegisteredProvider>> {
        self.by_key.get(key)
    }

    /// The instance with this provider id.
    #[must_use]
    pub fn by_provider_id(&self, id: &ProviderId) -> Option<&Arc<RegisteredProvider>> {
        self.by_key.values().find(|entry| entry.provider_id == *id)
    }

    /// Every instance, in no order.
    pub fn iter(&self) -> impl Iterator<Item = (&AdapterKey, &Arc<RegisteredProvider>)> {
        self.by_key.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::provider::{Capabilities, ProviderError};
    use crate::{Completion, EventSink, RunRequest};

    #[derive(Debug)]
    struct Idle;

    #[async_trait::async_trait]
    impl Provider for Idle {
        fn capabilities(&self) -> Capabilities {
            Capabilities::runs_only()
        }
        async fn execute(&self, _: RunRequest, _: &mut EventSink) -> Result<Completion, ProviderError> {
            Err(ProviderError::unsupported("idle"))
        }
    }

    #[test]
    fn replacing_lets_running_work_finish_and_takes_no_new() {
        // EXE-14
        let (key, id) = (AdapterKey::new("a").unwrap(), ProviderId::new("p").unwrap());
        let mut registry = ProviderRegistry::new();
        assert!(registry.register(key.clone(), id.clone(), Arc::new(Idle), CapacityGate::new(1)).is_none());
        let held = Arc::clone(registry.by_key(&key).unwrap());
        let permit = held.gate().try_enter();
        let old = registry.register(key.clone(), id.clone(), Arc::new(Idle), CapacityGate::new(1)).unwrap();
        assert!(Arc::ptr_eq(&old, &held) && held.is_draining());
        assert!(permit.is_some() && held.gate().in_use() == 1);
        let new = registry.by_provider_id(&id).unwrap();
        assert!(!new.is_draining() && new.gate().in_use() == 0);
        assert!(registry.drain(&key) && registry.remove(&key).is_some() && registry.by_key(&key).is_none());
    }
}
