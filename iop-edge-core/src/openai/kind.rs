//! Decides in what the requests that a provider answers differ: path, member that must be there, wire, and form of the answer.

use super::mend;
use super::record::Endpoint;
use super::rewrite::top_level::Key;
use crate::api::WireKind;

/// What a request asks a provider for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A chat completion.
    Chat,
    /// A completion of the older API.
    Completions,
    /// Embeddings.
    Embeddings,
    /// A response: sent to the provider as a chat, and built here from its answer (API-8).
    Responses,
    /// A message of Anthropic's API, for providers that speak it: passed as it is.
    Messages,
}

impl Kind {
    /// What the provider is asked by a tunnel.
    pub(crate) const fn path(self) -> &'static str {
        match self {
            Self::Chat | Self::Responses => "/v1/chat/completions",
            Self::Completions => "/v1/completions",
            Self::Embeddings => "/v1/embeddings",
            Self::Messages => "/v1/messages",
        }
    }

    pub(crate) const fn endpoint(self) -> Endpoint {
        match self {
            Self::Chat => Endpoint::Chat,
            Self::Completions => Endpoint::Completions,
            Self::Embeddings => Endpoint::Embeddings,
            Self::Responses => Endpoint::Responses,
            Self::Messages => Endpoint::Messages,
        }
    }

    /// The member that the model works on.
    pub(crate) const fn subject(self) -> &'static str {
        match self {
            Self::Chat | Self::Messages => "messages",
            Self::Completions => "prompt",
            Self::Embeddings | Self::Responses => "input",
        }
    }

    /// The only wire it can go by. A normalised run is a chat.
    pub(crate) const fn wire(self) -> Option<WireKind> {
        match self {
            Self::Chat | Self::Responses => None,
            Self::Completions | Self::Embeddings | Self::Messages => Some(WireKind::Tunnel),
        }
    }

    /// It may be sent again when its attempt failed (REC-1).
    pub(crate) const fn replays(self) -> bool {
        match self {
            Self::Chat | Self::Responses => true,
            Self::Completions | Self::Embeddings | Self::Messages => false,
        }
    }

    /// A stream of it reports usage only if it is told to.
    pub(crate) const fn asks_for_usage(self) -> bool {
        !matches!(self, Self::Messages)
    }

    /// It can be answered by a stream.
    pub(crate) const fn streams(self) -> bool {
        !matches!(self, Self::Embeddings)
    }

    /// What of a tunnelled answer is looked into. A response is read anyway.
    pub(crate) const fn mended(self) -> mend::Form {
        match self {
            Self::Chat => mend::Form::Chat,
            Self::Completions => mend::Form::Completions,
            Self::Messages => mend::Form::Messages,
            Self::Embeddings | Self::Responses => mend::Form::Other,
        }
    }

    /// The array without which a provider's whole answer is none.
    pub(crate) const fn answer(self) -> Key {
        match self {
            Self::Chat | Self::Completions | Self::Responses => Key::Choices,
            Self::Embeddings => Key::Data,
            Self::Messages => Key::Content,
        }
    }
}
