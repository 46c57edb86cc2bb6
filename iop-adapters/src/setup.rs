//! Decides why an adapter of an HTTP backend can't be set up.

use crate::auth::AuthError;
use crate::http::{HttpClientError, InvalidOrigin};

/// The adapter can't be set up as configured.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SetupError {
    /// The key.
    #[error("the provider's key can't be used")]
    Auth(#[from] AuthError),
    /// The base URL.
    #[error("the base URL can't be used")]
    BaseUrl(#[from] InvalidOrigin),
    /// The HTTP client.
    #[error("the HTTP client can't be set up")]
    Client(#[from] HttpClientError),
}
