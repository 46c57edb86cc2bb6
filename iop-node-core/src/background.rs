//! Decides where work lives that no connection owns: calls that are read to their end, instances that leave, configs that are
//! being built.
//!
//! It belongs to the Node: [`Background::wait`] is its end at a shutdown, and dropping the guard of [`Background::guard`]
//! its end when serving is dropped. Every task in it is bounded in time, or ends with something else that is.

use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;

use tokio::task::JoinSet;

/// Tasks of one Node. Cheap to clone; clones share the tasks.
#[derive(Debug, Clone, Default)]
pub(crate) struct Background(Arc<Mutex<JoinSet<()>>>);

impl Background {
    fn lock(&self) -> MutexGuard<'_, JoinSet<()>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let mut tasks = self.lock();
        // What has ended is forgotten here, so that the set holds what runs and little more.
        while let Some(ended) = tasks.try_join_next() {
            tell(&ended);
        }
        tasks.spawn(task);
    }

    /// Ready when nothing is left.
    pub(crate) async fn wait(&self) {
        while let Some(ended) = poll_fn(|cx| match self.lock().poll_join_next(cx) {
            Poll::Ready(ended) => Poll::Ready(ended),
            Poll::Pending => Poll::Pending,
        })
        .await
        {
            tell(&ended);
        }
    }

    /// Ends everything when it is dropped.
    pub(crate) fn guard(&self) -> Guard {
        Guard(self.clone())
    }
}

fn tell(ended: &Result<(), tokio::task::JoinError>) {
    if ended.as_ref().is_err_and(tokio::task::JoinError::is_panic) {
        tracing::error!("a background task of the Node panicked");
    }
}

pub(crate) struct Guard(Background);

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.lock().abort_all();
    }
}
