//! Decides how a link misbehaves in tests: a script says what becomes of each message that arrives.

use std::collections::VecDeque;
use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use futures_core::Stream;

use super::{Incoming, Link, LinkError, Outgoing, PeerIdentity};
use crate::message::{RunNumber, Sequenced, ToEdge, ToNode};

/// What becomes of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// It arrives.
    None,
    /// It is lost; the numbers of the others show the gap.
    Lose,
    /// It is lost and nobody can tell: the numbers close up.
    Swallow,
    /// It arrives twice, with the same number.
    Repeat,
    /// It can't be decoded; the link ends after it.
    Corrupt,
    /// It and everything after it is lost, and the direction ends.
    End,
    /// It changes places with the next message, if that is not of the same run; the numbers stay in order. A real link
    /// that carries runs separately may do that, so nothing may depend on it (WIR-2).
    Reorder,
    /// It waits until the script's delay is over.
    Delay,
}

/// One wait.
pub type Wait = Pin<Box<dyn Future<Output = ()> + Send>>;
/// Waits, for [`Fault::Delay`]. Called once per delayed message.
pub type Delay = Box<dyn FnMut() -> Wait + Send>;

/// Which run a message belongs to.
pub trait OfRun {
    /// The run, if it belongs to one.
    fn of_run(&self) -> Option<RunNumber>;
}

impl OfRun for ToEdge {
    fn of_run(&self) -> Option<RunNumber> {
        self.run()
    }
}

impl OfRun for ToNode {
    fn of_run(&self) -> Option<RunNumber> {
        self.run()
    }
}

/// Wraps one end of a link: `script` gets each message that arrives there, with its count from 1, and decides.
pub fn faulty<I, O>(
    link: Box<dyn Link<In = I, Out = O>>,
    script: impl FnMut(u64, &I) -> Fault + Send + 'static,
    delay: Option<Delay>,
) -> Box<dyn Link<In = I, Out = O>>
where
    I: OfRun + Clone + Send + Unpin + 'static,
    O: Send + 'static,
{
    Box::new(FaultLink { link, script: Box::new(script), delay })
}

type Script<I> = Box<dyn FnMut(u64, &I) -> Fault + Send>;

struct FaultLink<I, O> {
    link: Box<dyn Link<In = I, Out = O>>,
    script: Script<I>,
    delay: Option<Delay>,
}

impl<I: Send + 'static, O: Send + 'static> fmt::Debug for FaultLink<I, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("FaultLink").field(&self.link.peer()).finish()
    }
}

impl<I, O> Link for FaultLink<I, O>
where
    I: OfRun + Clone + Send + Unpin + 'static,
    O: Send + 'static,
{
    type In = I;
    type Out = O;

    fn peer(&self) -> PeerIdentity {
        self.link.peer()
    }

    fn start(self: Box<Self>, outgoing: Outgoing<O>) -> Incoming<I> {
        Box::pin(Faulty {
            incoming: Some(self.link.start(outgoing)),
            script: self.script,
            delay: self.delay,
            count: 0,
            shift: 0,
            held: None,
            waiting: None,
            ready: VecDeque::new(),
        })
    }
}

struct Faulty<I> {
    incoming: Option<Incoming<I>>,
    script: Script<I>,
    delay: Option<Delay>,
    count: u64,
    /// How many numbers are closed up.
    shift: u64,
    /// Waits for the next message to change places with.
    held: Option<Sequenced<I>>,
    waiting: Option<(Wait, Sequenced<I>)>,
    ready: VecDeque<Result<Sequenced<I>, LinkError>>,
}

impl<I: OfRun + Clone + Unpin> Faulty<I> {
    fn arrive(&mut self, mut message: Sequenced<I>) {
        self.count += 1;
        message.seq = message.seq.saturating_sub(self.shift);
        let fault = (self.script)(self.count, &message.message);
        if let Some(mut held) = self.held.take() {
            if held.message.of_run() == message.message.of_run() {
                self.ready.push_back(Ok(held));
            } else {
                std::mem::swap(&mut held.seq, &mut message.seq);
                self.ready.push_back(Ok(message));
                self.ready.push_back(Ok(held));
                return;
            }
        }
        match fault {
            Fault::None => self.ready.push_back(Ok(message)),
            Fault::Lose => {}
            Fault::Swallow => self.shift += 1,
            Fault::Repeat => self.ready.extend([Ok(message.clone()), Ok(message)]),
            Fault::Corrupt => {
                self.ready.push_back(Err(LinkError::Malformed("corrupted by a test")));
                self.incoming = None;
            }
            Fault::End => self.incoming = None,
            Fault::Reorder => self.held = Some(message),
            Fault::Delay => match &mut self.delay {
                Some(delay) => self.waiting = Some((delay(), message)),
                None => self.ready.push_back(Ok(message)),
            },
        }
    }
}

impl<I: OfRun + Clone + Unpin> Stream for Faulty<I> {
    type Item = Result<Sequenced<I>, LinkError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            if let Some(item) = self.ready.pop_front() {
                return Poll::Ready(Some(item));
            }
            if let Some((delay, _)) = &mut self.waiting {
                ready!(delay.as_mut().poll(cx));
                if let Some((_, message)) = self.waiting.take() {
                    return Poll::Ready(Some(Ok(message)));
                }
            }
            let Some(incoming) = &mut self.incoming else { return Poll::Ready(None) };
            match incoming.as_mut().poll_next(cx) {
                Poll::Ready(Some(Ok(message))) => self.arrive(message),
                Poll::Ready(Some(Err(error))) => return Poll::Ready(Some(Err(error))),
                Poll::Ready(None) => {
                    self.incoming = None;
                    let held = self.held.take().map(Ok);
                    self.ready.extend(held);
                }
                // Nothing came to change places with: what is held is not lost.
                Poll::Pending => return self.held.take().map_or(Poll::Pending, |held| Poll::Ready(Some(Ok(held)))),
            }
        }
    }
}

#[cfg(test)]
mod tests;
