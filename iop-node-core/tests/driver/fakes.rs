//! Instances that a test can look into and steer: a factory that makes them, by kind.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use iop_execution::provider::{Refreshed, TargetInfo};
use iop_execution::testkit::{Script, ScriptHandle, ScriptedProvider};
use iop_execution::{
    Capabilities, Completion, EventSink, HeadSink, Provider, ProviderError, RunRequest, Target, TunnelEnd,
    TunnelRequest,
};
use iop_node_core::{AdapterBuildError, AdapterFactory};
use iop_wire::{AdapterInventory, ProviderConfig};
use tokio::sync::watch;

use crate::support::config;

/// How long an instance of kind `slow` takes to start.
pub(crate) const SLOW: Duration = Duration::from_secs(3);

/// What a test knows about one instance, and what it can change.
#[derive(Debug)]
pub(crate) struct Instance {
    pub(crate) config: ProviderConfig,
    pub(crate) calls: ScriptHandle,
    pub(crate) offers: Mutex<Capabilities>,
    /// What the next question finds; `None`: it never comes back.
    pub(crate) answer: Mutex<Option<Refreshed>>,
    pub(crate) counts: watch::Sender<Lifecycle>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Lifecycle {
    pub(crate) starts: u32,
    pub(crate) stops: u32,
    pub(crate) asked: u32,
    pub(crate) asking: u32,
    pub(crate) most_asking: u32,
}

impl Instance {
    pub(crate) fn lifecycle(&self) -> Lifecycle {
        *self.counts.borrow()
    }

    pub(crate) fn lists(&self, targets: &[&str]) {
        let targets = targets.iter().map(|name| TargetInfo::new(Target::new(*name).unwrap())).collect();
        self.offers.lock().unwrap().targets = targets;
    }

    pub(crate) fn has_places(&self, places: u32) {
        self.offers.lock().unwrap().max_concurrency = std::num::NonZeroU32::new(places);
    }

    pub(crate) fn answers(&self, answer: Option<Refreshed>) {
        *self.answer.lock().unwrap() = answer;
    }

    pub(crate) async fn wait_for(&self, wanted: impl FnMut(&Lifecycle) -> bool) {
        self.counts.subscribe().wait_for(wanted).await.unwrap();
    }
}

#[derive(Debug)]
struct Fake {
    inner: ScriptedProvider,
    instance: Arc<Instance>,
}

struct Asking<'a>(&'a Instance);

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        self.0.counts.send_modify(|counts| counts.asking -= 1);
    }
}

#[async_trait]
impl Provider for Fake {
    fn capabilities(&self) -> Capabilities {
        self.instance.offers.lock().unwrap().clone()
    }
    async fn execute(&self, run: RunRequest, sink: &mut EventSink) -> Result<Completion, ProviderError> {
        self.inner.execute(run, sink).await
    }
    async fn tunnel(&self, request: TunnelRequest, head: HeadSink) -> Result<TunnelEnd, ProviderError> {
        self.inner.tunnel(request, head).await
    }
    async fn start(&self) -> Result<(), ProviderError> {
        self.instance.counts.send_modify(|counts| counts.starts += 1);
        match self.instance.config.kind.as_str() {
            "refuse" => Err(ProviderError::unsupported("it can't")),
            "panic" => panic!("at start"),
            "hang" => std::future::pending().await,
            "slow" => {
                tokio::time::sleep(SLOW).await;
                Ok(())
            }
            _ => Ok(()),
        }
    }
    async fn refresh(&self) -> Refreshed {
        self.instance.counts.send_modify(|counts| {
            counts.asked += 1;
            counts.asking += 1;
            counts.most_asking = counts.most_asking.max(counts.asking);
        });
        let _asking = Asking(&self.instance);
        let answer = *self.instance.answer.lock().unwrap();
        match answer {
            Some(answer) => answer,
            None => std::future::pending().await,
        }
    }
    async fn stop(&self) {
        self.instance.counts.send_modify(|counts| counts.stops += 1);
    }
}

/// Makes [`Instance`]s of any kind but `unknown`.
#[derive(Debug)]
pub(crate) struct Fakes {
    script: Script,
    made: Mutex<Vec<Arc<Instance>>>,
}

impl Fakes {
    /// Each call of an instance follows this script.
    pub(crate) fn new(script: Script) -> Arc<Self> {
        Arc::new(Self { script, made: Mutex::default() })
    }

    /// The newest instance of this adapter key.
    pub(crate) fn newest(&self, key: &str) -> Arc<Instance> {
        let made = self.made.lock().unwrap();
        Arc::clone(made.iter().rev().find(|made| made.config.adapter.as_str() == key).unwrap())
    }

    /// Instances that are started and not stopped, by key.
    pub(crate) fn alive(&self) -> Vec<String> {
        let made = self.made.lock().unwrap();
        let alive = made.iter().filter(|made| made.lifecycle().starts > made.lifecycle().stops);
        let mut keys: Vec<_> = alive.map(|made| made.config.adapter.as_str().to_owned()).collect();
        keys.sort();
        keys
    }
}

#[async_trait]
impl AdapterFactory for Fakes {
    async fn build(&self, config: &ProviderConfig) -> Result<Arc<dyn Provider>, AdapterBuildError> {
        if config.kind == "unknown" {
            return Err(AdapterBuildError::UnknownKind(config.kind.clone()));
        }
        let inner = ScriptedProvider::new(self.script.clone()).with_tunnels();
        let instance = Arc::new(Instance {
            config: config.clone(),
            calls: inner.handle(),
            offers: Mutex::new(Capabilities::runs_only().with_tunnels()),
            answer: Mutex::new(Some(Refreshed::Answered)),
            counts: watch::Sender::default(),
        });
        instance.lists(&["t"]);
        self.made.lock().unwrap().push(Arc::clone(&instance));
        Ok(Arc::new(Fake { inner, instance }))
    }

    fn inventory(&self) -> Vec<AdapterInventory> {
        Vec::new()
    }
}

/// A provider `p-KEY` of this kind under this key.
pub(crate) fn fake(key: &str, kind: &str) -> ProviderConfig {
    ProviderConfig {
        provider_id: iop_execution::ProviderId::new(format!("p-{key}")).unwrap(),
        adapter: iop_execution::AdapterKey::new(key).unwrap(),
        kind: kind.into(),
        ..config()
    }
}
