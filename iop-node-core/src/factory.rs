//! Decides how a configured provider becomes an adapter instance: the seam that keeps adapters out of the engine.

use std::borrow::Cow;
use std::sync::Arc;

use async_trait::async_trait;
use iop_execution::Provider;
use iop_wire::{AdapterInventory, ProviderConfig};

/// Config kind of providers that the embedding program supplies itself, matched by adapter key.
pub const CUSTOM_KIND: &str = "custom";

/// Makes adapter instances from config.
#[async_trait]
pub trait AdapterFactory: Send + Sync + 'static {
    /// Makes one instance. Its `start` is called by the Node afterwards. Must not wait for the backend: a backend that is
    /// merely down is no error.
    ///
    /// # Errors
    /// [`AdapterBuildError`] when the instance can't ever work as configured; the provider is left out of ready.
    ///
    /// # Cancel safety
    /// May be dropped at any await, when the connection ends meanwhile.
    async fn build(&self, config: &ProviderConfig) -> Result<Arc<dyn Provider>, AdapterBuildError>;

    /// The kinds it can make, for the registration.
    fn inventory(&self) -> Vec<AdapterInventory>;
}

/// Why a provider of the config can't run on this Node. Its text goes to the log: no secret, no URL with a query.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AdapterBuildError {
    /// No adapter of that kind is built in.
    #[error("this Node has no adapter of kind `{0}`")]
    UnknownKind(String),
    /// The config can't work.
    #[error("{0}")]
    Config(Cow<'static, str>),
    /// The credential reference can't be resolved on this Node.
    #[error("auth: {0}")]
    Auth(Cow<'static, str>),
}

impl AdapterBuildError {
    /// A config that can't work, in one sentence without secrets.
    #[must_use]
    pub fn config(message: impl Into<Cow<'static, str>>) -> Self {
        Self::Config(message.into())
    }

    /// A credential reference that can't be resolved, in one sentence without secrets.
    #[must_use]
    pub fn auth(message: impl Into<Cow<'static, str>>) -> Self {
        Self::Auth(message.into())
    }
}

/// Makes nothing: for Nodes that serve only providers of the embedding program.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoFactory;

#[async_trait]
impl AdapterFactory for NoFactory {
    async fn build(&self, config: &ProviderConfig) -> Result<Arc<dyn Provider>, AdapterBuildError> {
        Err(AdapterBuildError::UnknownKind(config.kind.clone()))
    }

    fn inventory(&self) -> Vec<AdapterInventory> {
        Vec::new()
    }
}
