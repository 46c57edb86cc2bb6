use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};

use super::*;
use crate::http::tests::settle;

/// Connections and their other sides.
async fn pairs(count: usize) -> Vec<(Socket, TcpStream)> {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut pairs = Vec::new();
    for _ in 0..count {
        let ours = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        pairs.push((Socket::Plain(ours), listener.accept().await.unwrap().0));
    }
    pairs
}

fn port(socket: &Socket) -> u16 {
    let Socket::Plain(tcp) = socket else { panic!("no TLS here") };
    tcp.local_addr().unwrap().port()
}

#[tokio::test]
async fn the_connection_used_last_is_used_next() {
    let pool = Pool::default();
    let (ours, _theirs): (Vec<_>, Vec<_>) = pairs(3).await.into_iter().unzip();
    let ports: Vec<_> = ours.iter().map(port).collect();
    ours.into_iter().for_each(|socket| pool.put(socket));
    let taken: Vec<_> = std::iter::from_fn(|| pool.take()).map(|socket| port(&socket)).collect();
    assert_eq!(taken, [ports[2], ports[1], ports[0]]);
}

#[tokio::test]
async fn a_connection_that_was_closed_or_says_something_is_not_used() {
    // NOD-10: a request goes into a live connection or none, as there is no second attempt
    let pool = Pool::default();
    let (ours, mut theirs): (Vec<_>, Vec<_>) = pairs(4).await.into_iter().unzip();
    let live = port(&ours[0]);
    ours.into_iter().for_each(|socket| pool.put(socket));
    theirs.pop().unwrap().set_zero_linger().unwrap();
    theirs.pop().unwrap().shutdown().await.unwrap();
    theirs[1].write_all(b"HTTP/1.1 408 Request Timeout\r\n\r\n").await.unwrap();
    settle().await;
    assert_eq!(pool.take().map(|socket| port(&socket)), Some(live));
    assert!(pool.take().is_none());
}

#[tokio::test]
async fn a_connection_is_closed_after_its_idle_time() {
    let pool = Pool::default();
    let (mut ours, _theirs): (Vec<_>, Vec<_>) = pairs(3).await.into_iter().unzip();
    tokio::time::pause();
    pool.put(ours.pop().unwrap());
    tokio::time::advance(POOL_IDLE - Duration::from_millis(1)).await;
    pool.put(ours.pop().unwrap());
    assert_eq!(pool.len(), 2);
    tokio::time::advance(Duration::from_millis(1)).await;
    pool.put(ours.pop().unwrap());
    assert_eq!(pool.len(), 2, "the first is too old");
    tokio::time::advance(POOL_IDLE).await;
    assert!(pool.take().is_none());
    assert_eq!(pool.len(), 0);
}

#[tokio::test]
async fn idle_connections_are_bounded_in_number() {
    let pool = Pool::default();
    let (ours, _theirs): (Vec<_>, Vec<_>) = pairs(MAX_IDLE + 1).await.into_iter().unzip();
    let oldest = port(&ours[0]);
    ours.into_iter().for_each(|socket| pool.put(socket));
    assert_eq!(pool.len(), MAX_IDLE);
    assert!(std::iter::from_fn(|| pool.take()).all(|socket| port(&socket) != oldest));
}
