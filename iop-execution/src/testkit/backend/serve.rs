//! Decides how an answer's steps become writes, and how a client that leaves is noticed.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use bytes::BytesMut;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use super::{Answer, Shared, Step, http1};

pub(super) async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let Ok((stream, _)) = accepted else { continue };
                shared.note(|traffic| {
                    traffic.connections += 1;
                    traffic.open += 1;
                });
                let number = shared.traffic.borrow().connections;
                connections.spawn(connection(stream, Arc::clone(&shared), number));
            }
            Some(_) = connections.join_next() => {}
        }
    }
}

struct Open(Arc<Shared>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.note(|traffic| traffic.open -= 1);
    }
}

async fn connection(mut stream: TcpStream, shared: Arc<Shared>, number: u64) {
    let _open = Open(Arc::clone(&shared));
    let _ = stream.set_nodelay(true);
    let mut buffer = BytesMut::new();
    // A request that is no HTTP, or a client that breaks off, ends the connection: the test sees it in the counts.
    while let Ok(Some(request)) = http1::read_request(&mut stream, &mut buffer, number).await {
        let answer = shared.answer(&request);
        shared.record(request);
        shared.note(|traffic| {
            traffic.requests += 1;
            traffic.answering += 1;
            traffic.max_answering = traffic.max_answering.max(traffic.answering);
        });
        let end = respond(&mut stream, &mut buffer, &answer, &shared).await;
        shared.note(|traffic| {
            traffic.answering -= 1;
            match end {
                End::Done | End::Close | End::Reset => traffic.answered += 1,
                End::ClientClosed => {
                    traffic.client_closed += 1;
                    traffic.last_client_close = Some(Instant::now());
                }
            }
        });
        match end {
            End::Done => {}
            End::Reset => {
                let _ = stream.set_zero_linger();
                return;
            }
            End::Close | End::ClientClosed => return,
        }
    }
}

#[derive(Clone, Copy)]
enum End {
    Done,
    Close,
    Reset,
    ClientClosed,
}

async fn respond(stream: &mut TcpStream, early: &mut BytesMut, answer: &Answer, shared: &Shared) -> End {
    let (mut read, mut write) = stream.split();
    tokio::select! {
        biased;
        end = write_answer(&mut write, answer, shared) => end.unwrap_or(End::ClientClosed),
        () = client_close(&mut read, early) => End::ClientClosed,
    }
}

/// Ready when the client closed its side. What it sends meanwhile is kept for the next request.
async fn client_close(read: &mut ReadHalf<'_>, early: &mut BytesMut) {
    while matches!(read.read_buf(early).await, Ok(1..)) {}
}

struct Waiting<'a>(&'a Shared);

impl<'a> Waiting<'a> {
    fn enter(shared: &'a Shared) -> Self {
        shared.note(|traffic| traffic.waiting += 1);
        Self(shared)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.note(|traffic| traffic.waiting -= 1);
    }
}

async fn write_answer(write: &mut WriteHalf<'_>, answer: &Answer, shared: &Shared) -> io::Result<End> {
    if answer.status == 0 && answer.steps.is_empty() {
        return Ok(End::Reset);
    }
    let chunked = !answer.headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("content-length"));
    let mut headed = false;
    for step in &answer.steps {
        if !headed && answer.status != 0 && (!answer.late_head || matches!(step, Step::Write(_))) {
            write_head(write, answer, chunked).await?;
            headed = true;
        }
        match step {
            Step::Write(bytes) => {
                if chunked {
                    let mut chunk = format!("{:x}\r\n", bytes.len()).into_bytes();
                    chunk.extend_from_slice(bytes);
                    chunk.extend_from_slice(b"\r\n");
                    write.write_all(&chunk).await?;
                } else {
                    write.write_all(bytes).await?;
                }
                let written = bytes.len() as u64;
                shared.note(|traffic| traffic.written += written);
                // Lets the client read what is written before more is: a step is one read where the machine allows.
                tokio::task::yield_now().await;
            }
            Step::Pause => {
                let _waiting = Waiting::enter(shared);
                if let Ok(permit) = shared.release.acquire().await {
                    permit.forget();
                }
            }
            Step::Wait(time) => tokio::time::sleep(*time).await,
            Step::Hang => {
                let _waiting = Waiting::enter(shared);
                std::future::pending::<()>().await;
            }
            Step::Reset => return Ok(End::Reset),
            Step::Close => {
                write.shutdown().await?;
                return Ok(End::Close);
            }
        }
    }
    if !headed {
        write_head(write, answer, chunked).await?;
    }
    if chunked {
        write.write_all(b"0\r\n\r\n").await?;
    }
    Ok(End::Done)
}

async fn write_head(write: &mut WriteHalf<'_>, answer: &Answer, chunked: bool) -> io::Result<()> {
    let mut head = format!("HTTP/1.1 {} Scripted\r\n", answer.status);
    for (name, value) in &answer.headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    if chunked {
        head.push_str("transfer-encoding: chunked\r\n");
    }
    head.push_str("\r\n");
    write.write_all(head.as_bytes()).await
}
