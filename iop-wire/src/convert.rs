//! Decides how messages become protobuf and back, and which values are out of range: the only door of the crate (WIR-4).
//!
//! After this border nothing is checked again. What is wrong with a message that names its run is that run's fault and
//! ends it; anything else ends the connection (WIR-15, W17).

use bytes::{Buf, BufMut, Bytes, BytesMut};
use prost::Message;

use crate::limits::{MAX_CONFIG_ENVELOPE, MAX_ENVELOPE, MAX_PRE_REGISTER_ENVELOPE, PRE_REGISTER_MESSAGES};
use crate::link::LinkError;
use crate::message::{RunNumber, Sequenced, ToEdge, ToNode};
use crate::proto;

mod bounds;
mod check;
mod dispatch;
mod enums;
mod envelope;
mod failure;
mod output;
mod registration;
mod session;
#[cfg(test)]
mod tests;

/// A message that breaks the protocol. The text names a field and holds no value of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{problem}")]
pub struct ConvertError {
    /// What is wrong.
    pub problem: &'static str,
    /// The run it belongs to, where that is beyond doubt: the violation is that run's alone.
    pub run: Option<RunNumber>,
}

impl ConvertError {
    pub(crate) const fn new(problem: &'static str) -> Self {
        Self { problem, run: None }
    }

    const fn in_run(mut self, run: RunNumber) -> Self {
        self.run = Some(run);
        self
    }

    /// The fault of that run, if the message has one and its number is known.
    fn of(self, run: Option<RunNumber>) -> Self {
        match run {
            Some(run) if run.0 != 0 => self.in_run(run),
            _ => self,
        }
    }

    fn into_link_error(self, seq: u64) -> LinkError {
        match self.run {
            Some(run) => LinkError::MalformedRun { seq, run, problem: self.problem },
            None => LinkError::Malformed(self.problem),
        }
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for crate::ToEdge {}
    impl Sealed for crate::ToNode {}
}

/// A message that crosses the wire: `ToEdge` or `ToNode`.
pub trait WireMessage: Sized + Send + Sync + 'static + sealed::Sealed + Clone {
    /// Largest encoded envelope of this direction, in bytes.
    const LIMIT: usize;
    /// Largest encoded envelope among the first [`PRE_REGISTER_MESSAGES`] of this direction, in bytes (REG-8).
    const OPENING_LIMIT: usize;

    /// Largest encoded envelope of this message, in bytes (WIR-8, REG-8).
    #[must_use]
    fn limit(&self) -> usize;

    #[doc(hidden)]
    fn into_envelope(message: Sequenced<Self>) -> proto::Envelope;

    /// # Errors
    /// [`ConvertError`].
    #[doc(hidden)]
    fn from_envelope(envelope: proto::Envelope) -> Result<Sequenced<Self>, ConvertError>;

    /// Encodes an envelope.
    ///
    /// # Errors
    /// [`LinkError::TooLarge`] when it is larger than [`WireMessage::limit`].
    fn encode(message: Sequenced<Self>) -> Result<Bytes, LinkError> {
        let mut buffer = BytesMut::new();
        encode_into(message, &mut buffer, BytesMut::reserve)?;
        Ok(buffer.freeze())
    }

    /// Decodes an envelope. Payloads may share the buffer.
    ///
    /// # Errors
    /// [`LinkError::TooLarge`], [`LinkError::Malformed`] and [`LinkError::MalformedRun`].
    fn decode(bytes: Bytes) -> Result<Sequenced<Self>, LinkError> {
        decode_from(bytes)
    }

    /// Checks what the peer would check: size and ranges. For whatever comes from a caller, before it is pushed (W3): a
    /// transport that meets a message it can't send ends the connection. Numbers of runs and their `n` are not looked at: the
    /// outbox gives them when it writes.
    ///
    /// Messages of runs, requests included, are checked in place: no copy, no encoding.
    ///
    /// # Errors
    /// [`ConvertError`] that names what the peer would refuse.
    fn check(&self) -> Result<(), ConvertError>;
}

/// Encodes straight into a transport's buffer.
pub(crate) fn encode_into<M: WireMessage, B: BufMut>(
    message: Sequenced<M>,
    buffer: &mut B,
    reserve: impl FnOnce(&mut B, usize),
) -> Result<(), LinkError> {
    let limit = message.message.limit();
    let envelope = M::into_envelope(message);
    let length = envelope.encoded_len();
    if length > limit {
        return Err(LinkError::TooLarge);
    }
    reserve(buffer, length);
    envelope.encode(buffer).map_err(|_| LinkError::TooLarge)
}

/// Decodes the `ordinal`-th envelope of a direction, from 1, out of a transport's buffer which holds exactly that one.
pub(crate) fn decode_nth<M: WireMessage>(ordinal: u32, buffer: impl Buf) -> Result<Sequenced<M>, LinkError> {
    if ordinal <= PRE_REGISTER_MESSAGES && buffer.remaining() > M::OPENING_LIMIT {
        return Err(LinkError::TooLarge);
    }
    decode_from(buffer)
}

/// Decodes from a transport's buffer, which holds exactly one envelope.
fn decode_from<M: WireMessage>(buffer: impl Buf) -> Result<Sequenced<M>, LinkError> {
    let length = buffer.remaining();
    if length > M::LIMIT {
        return Err(LinkError::TooLarge);
    }
    let envelope = proto::Envelope::decode(buffer).map_err(|_| LinkError::Malformed("not an envelope"))?;
    let seq = envelope.seq;
    let message = M::from_envelope(envelope).map_err(|error| error.into_link_error(seq))?;
    if length > message.message.limit() {
        return Err(LinkError::TooLarge);
    }
    Ok(message)
}

impl WireMessage for ToEdge {
    const LIMIT: usize = MAX_ENVELOPE;
    const OPENING_LIMIT: usize = MAX_PRE_REGISTER_ENVELOPE;

    fn limit(&self) -> usize {
        match self {
            Self::Hello(_) | Self::Register(_) => MAX_PRE_REGISTER_ENVELOPE,
            Self::Ready(_)
            | Self::Accepted(_)
            | Self::Event(..)
            | Self::Frame(..)
            | Self::Credit(..)
            | Self::CommandResponse(_)
            | Self::ConfigAck(_)
            | Self::Ping(_)
            | Self::Pong(_)
            | Self::Drain(_)
            | Self::Goodbye(_) => MAX_ENVELOPE,
        }
    }

    fn check(&self) -> Result<(), ConvertError> {
        check::to_edge(self).map_err(|error| error.of(self.run()))
    }

    fn into_envelope(message: Sequenced<Self>) -> proto::Envelope {
        message.into()
    }

    fn from_envelope(envelope: proto::Envelope) -> Result<Sequenced<Self>, ConvertError> {
        envelope.try_into()
    }
}

impl WireMessage for ToNode {
    const LIMIT: usize = MAX_CONFIG_ENVELOPE;
    const OPENING_LIMIT: usize = Self::LIMIT;

    fn limit(&self) -> usize {
        match self {
            Self::RegisterResponse(_) | Self::ConfigUpdate(_) => MAX_CONFIG_ENVELOPE,
            Self::HelloAck(_)
            | Self::ReadyResponse(_)
            | Self::Run(_)
            | Self::Tunnel(_)
            | Self::Chunk(_)
            | Self::Credit(..)
            | Self::Cancel(..)
            | Self::Command(_)
            | Self::Ping(_)
            | Self::Pong(_)
            | Self::Drain(_)
            | Self::Goodbye(_) => MAX_ENVELOPE,
        }
    }

    fn check(&self) -> Result<(), ConvertError> {
        check::to_node(self).map_err(|error| error.of(self.run()))
    }

    fn into_envelope(message: Sequenced<Self>) -> proto::Envelope {
        message.into()
    }

    fn from_envelope(envelope: proto::Envelope) -> Result<Sequenced<Self>, ConvertError> {
        envelope.try_into()
    }
}
