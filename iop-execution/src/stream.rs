//! Decides what a caller holds: a stream of events that is fused after its one terminal and cancels when dropped.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures_core::Stream;
use pin_project::pin_project;

use crate::event::RunEvent;
use crate::execution::{RunExecution, TunnelExecution};
use crate::frame::TunnelFrame;
use crate::id::RunId;
use crate::provider::Provider;
use crate::request::{RunRequest, TunnelRequest};

macro_rules! caller_stream {
    ($(#[$doc:meta])* $name:ident, $item:ty, $terminal:expr) => {
        $(#[$doc])*
        ///
        /// After admission every failure is a terminal item, never an `Err`. Dropping the stream before its terminal
        /// cancels the run (EXE-6).
        #[pin_project]
        #[must_use = "dropping the stream cancels the run"]
        pub struct $name {
            run_id: RunId,
            #[pin]
            inner: Option<Pin<Box<dyn Stream<Item = $item> + Send>>>,
        }

        impl $name {
            /// A stream over a source whose drop cancels the run.
            pub fn new(run_id: RunId, source: impl Stream<Item = $item> + Send + 'static) -> Self {
                Self { run_id, inner: Some(Box::pin(source)) }
            }

            /// The run's id, for `cancel(run_id)` and for logs.
            #[must_use]
            pub const fn run_id(&self) -> RunId {
                self.run_id
            }
        }

        impl Stream for $name {
            type Item = $item;

            fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<$item>> {
                let mut this = self.project();
                let Some(source) = this.inner.as_mut().as_pin_mut() else {
                    return Poll::Ready(None);
                };
                let item = std::task::ready!(source.poll_next(cx));
                let terminal: fn(&$item) -> bool = $terminal;
                if item.as_ref().is_none_or(terminal) {
                    this.inner.set(None);
                }
                Poll::Ready(item)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_struct(stringify!($name))
                    .field("run_id", &self.run_id)
                    .field("ended", &self.inner.is_none())
                    .finish()
            }
        }
    };
}

caller_stream! {
    /// The events of one normalised run.
    RunStream, RunEvent, |event| event.kind.is_terminal()
}
caller_stream! {
    /// The frames of one tunnel.
    TunnelStream, TunnelFrame, TunnelFrame::is_terminal
}

impl RunStream {
    /// Runs a request on a provider in this process, without Edge or Node.
    pub fn local(provider: Arc<dyn Provider>, request: RunRequest) -> Self {
        Self::new(request.run_id, RunExecution::run(provider, request))
    }
}

impl TunnelStream {
    /// Relays a request on a provider in this process, without Edge or Node.
    pub fn local(provider: Arc<dyn Provider>, request: TunnelRequest) -> Self {
        Self::new(request.run_id, TunnelExecution::tunnel(provider, request))
    }
}
