//! Decides how envelopes and gRPC frames meet: encoded into the frame buffer, decoded out of it, checked both times.

use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Buf;
use tonic::Status;
use tonic::codec::{BufferSettings, Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};

use super::{Decoded, Shared};
use crate::convert::{WireMessage, decode_nth, encode_into};
use crate::message::Sequenced;

/// First size of a stream's frame buffer, and how it grows.
const BUFFER: usize = 16 * 1024;
/// Encoded bytes that go to HTTP/2 in one piece at most.
const PIECE: usize = 32 * 1024;

fn settings() -> BufferSettings {
    BufferSettings::new(BUFFER, PIECE)
}

pub(super) struct EnvelopeCodec<I, O> {
    shared: Arc<Shared>,
    direction: PhantomData<fn(O) -> I>,
}

impl<I, O> EnvelopeCodec<I, O> {
    pub(super) fn new(shared: &Arc<Shared>) -> Self {
        Self { shared: Arc::clone(shared), direction: PhantomData }
    }
}

impl<I: WireMessage, O: WireMessage> Codec for EnvelopeCodec<I, O> {
    type Encode = Sequenced<O>;
    type Decode = Decoded<I>;
    type Encoder = EnvelopeEncoder<O>;
    type Decoder = EnvelopeDecoder<I>;

    fn encoder(&mut self) -> Self::Encoder {
        EnvelopeEncoder { shared: Arc::clone(&self.shared), message: PhantomData }
    }

    fn decoder(&mut self) -> Self::Decoder {
        EnvelopeDecoder { decoded: 0, message: PhantomData }
    }
}

pub(super) struct EnvelopeEncoder<M> {
    shared: Arc<Shared>,
    message: PhantomData<fn(M)>,
}

impl<M: WireMessage> Encoder for EnvelopeEncoder<M> {
    type Item = Sequenced<M>;
    type Error = Status;

    fn encode(&mut self, item: Sequenced<M>, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        encode_into(item, buffer, |buffer, length| buffer.reserve(length)).map_err(|error| {
            self.shared.oversize.store(true, Ordering::Relaxed);
            tracing::error!(%error, "a message could not be sent; the connection ends");
            Status::internal("a message could not be sent")
        })
    }

    fn buffer_settings(&self) -> BufferSettings {
        settings()
    }
}

pub(super) struct EnvelopeDecoder<M> {
    /// Envelopes so far; stops counting at the largest number.
    decoded: u32,
    message: PhantomData<fn() -> M>,
}

impl<M: WireMessage> Decoder for EnvelopeDecoder<M> {
    type Item = Decoded<M>;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<Self::Item>, Status> {
        self.decoded = self.decoded.saturating_add(1);
        let decoded = decode_nth(self.decoded, &mut *buffer);
        // What a failed decode left must not be taken for the next frame.
        buffer.advance(buffer.remaining());
        Ok(Some(decoded))
    }

    fn buffer_settings(&self) -> BufferSettings {
        settings()
    }
}
