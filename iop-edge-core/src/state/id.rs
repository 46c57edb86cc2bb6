//! Decides how connections, generations and attempts are told apart inside one Edge. None of these is on the wire.

use std::fmt;

/// One configured provider on one Node, over changes of the config.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ProviderKey(pub(crate) u64);

/// One command to a Node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct CommandId(pub(crate) u64);

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident;)*) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub(crate) u64);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    )*};
}

counters! {
    /// One link, from its first byte to its end.
    ConnectionId;
    /// One accepted life of a Node: given when ownership is claimed, strictly rising. Everything a connection owns is
    /// judged by it (FEN-1).
    Generation;
    /// One admission of a request: a waiter first, then the owner of one place.
    AttemptId;
}
