//! Decides which congestion control the socket of a link uses: the system's, unless another is asked for and allowed (WIR-11).

use tokio::net::TcpStream;

/// Congestion control of the sockets of a link.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Congestion {
    /// What the system uses for every socket.
    #[default]
    System,
    /// BBR: for long ways with some loss. Many systems allow it only to privileged processes.
    Bbr,
    /// CUBIC.
    Cubic,
}

impl Congestion {
    /// Every value.
    pub const ALL: &'static [Self] = &[Self::System, Self::Bbr, Self::Cubic];

    /// The name used in configuration and logs.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::Bbr => "bbr",
            Self::Cubic => "cubic",
        }
    }
}

/// Which congestion control a socket uses, by the system's own name for it. `None` where that can't be told: only Linux says.
#[must_use]
pub fn congestion(socket: &TcpStream) -> Option<String> {
    os::get(socket)
}

/// Sets what was asked for; the system's stays where that is refused.
pub(super) fn apply(socket: &TcpStream, wanted: Congestion) {
    let refused = match wanted {
        Congestion::System => None,
        Congestion::Bbr | Congestion::Cubic => os::set(socket, wanted.as_str()).err(),
    };
    let active = congestion(socket);
    let active = active.as_deref().unwrap_or("unknown");
    match refused {
        Some(error) => {
            let reason = super::reason::of(&error);
            tracing::debug!(%wanted, active, %reason, "the congestion control was refused");
        }
        None => tracing::debug!(%wanted, active, "connected"),
    }
}

impl std::fmt::Display for Congestion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(target_os = "linux")]
mod os {
    use std::io;

    use socket2::SockRef;
    use tokio::net::TcpStream;

    pub(super) fn set(socket: &TcpStream, name: &str) -> io::Result<()> {
        SockRef::from(socket).set_tcp_congestion(name.as_bytes())
    }

    pub(super) fn get(socket: &TcpStream) -> Option<String> {
        let name = SockRef::from(socket).tcp_congestion().ok()?;
        // The system fills the rest with zeros.
        let name = name.split(|byte| *byte == 0).next()?;
        std::str::from_utf8(name).ok().filter(|name| !name.is_empty()).map(str::to_owned)
    }
}

#[cfg(not(target_os = "linux"))]
mod os {
    use std::io;

    use tokio::net::TcpStream;

    pub(super) fn set(_: &TcpStream, _: &str) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub(super) fn get(_: &TcpStream) -> Option<String> {
        None
    }
}

#[cfg(test)]
#[cfg(target_os = "linux")]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    async fn socket() -> TcpStream {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        TcpStream::connect(listener.local_addr().unwrap()).await.unwrap()
    }

    #[tokio::test]
    async fn what_is_allowed_is_set_and_what_is_not_leaves_the_socket_as_it_was() {
        // WIR-11
        let before = congestion(&socket().await);
        for wanted in Congestion::ALL {
            let allowed = os::set(&socket().await, wanted.as_str()).is_ok();
            let socket = socket().await;
            apply(&socket, *wanted);
            let expected = if allowed { Some(wanted.as_str().to_owned()) } else { before.clone() };
            assert_eq!(congestion(&socket), expected, "{wanted}");
        }
        // The one that every kernel has: a socket that uses it can be told from one that never changed.
        let socket = socket().await;
        if os::set(&socket, "reno").is_ok() {
            apply(&socket, Congestion::System);
            assert_eq!(congestion(&socket).as_deref(), Some("reno"), "the system's choice is not ours to change");
            let allowed = os::set(&socket, "cubic").is_ok();
            let _ = os::set(&socket, "reno");
            apply(&socket, Congestion::Cubic);
            assert_eq!(congestion(&socket).as_deref(), Some(if allowed { "cubic" } else { "reno" }));
        }
    }
}
