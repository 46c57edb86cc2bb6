use bytes::Bytes;
use futures_util::StreamExt as _;
use http::{HeaderMap, HeaderName, HeaderValue, Method};
use iop_execution::{FailureCode, ProviderContacted, TunnelFrame};
use iop_wire::ToNode;
use iop_wire::convert::WireMessage as _;
use iop_wire::limits::{MAX_ENVELOPE, MAX_HEADER_BYTES, MAX_HEADERS, MAX_PATH};

use super::script::*;
use crate::edge::TunnelCall;
use crate::observe::{Observation, ReleaseCause};

fn headers(count: usize, bytes: usize) -> HeaderMap {
    let value = vec![b'v'; bytes / count - "x-000".len()];
    let header = |at| {
        let name = HeaderName::from_bytes(format!("x-{at:03}").as_bytes()).unwrap();
        (name, HeaderValue::from_bytes(&value).unwrap())
    };
    (0..count).map(header).collect()
}

fn path(len: usize) -> String {
    format!("/{}", "p".repeat(len - 1))
}

#[tokio::test(start_paused = true)]
async fn w3_a_tunnel_that_its_node_would_refuse_fails_alone_and_is_not_sent() {
    // WIR-8, WIR-15
    let (edge, recorder) = recorded();
    let mut node = Node::connect(&edge, "n1").await;
    let endless = Method::from_bytes(&[b'M'; MAX_ENVELOPE]).unwrap();
    let illegal = [
        TunnelCall { headers: headers(MAX_HEADERS + 1, 1024), ..call(Bytes::new()) },
        TunnelCall { headers: headers(1, MAX_HEADER_BYTES + 1), ..call(Bytes::new()) },
        TunnelCall { path: path(MAX_PATH + 1), ..call(Bytes::new()) },
        TunnelCall { path: "/v1\n".into(), ..call(Bytes::new()) },
        TunnelCall { path: "/v1\u{85}".into(), ..call(Bytes::new()) },
        TunnelCall { method: endless, ..call(Bytes::new()) },
    ];
    let count = illegal.len();
    for call in illegal {
        let (_, mut stream) = edge.submit_tunnel(to("only-a"), call).await.unwrap();
        let Some(TunnelFrame::Failed(failure)) = stream.next().await else { panic!("no failure") };
        assert_eq!((failure.code, failure.provider_contacted), (FailureCode::Internal, ProviderContacted::No));
        assert!(stream.next().await.is_none());
        assert!(node.pending().await.is_empty(), "nothing is sent");
        assert_at_rest(&edge);
    }
    let failed =
        |seen: &Observation| matches!(seen, Observation::LeaseReleased { cause: ReleaseCause::SendFailed, .. });
    assert_eq!(recorder.count(failed), count);
    assert!(provider(&edge, "a").connected);
}

#[tokio::test(start_paused = true)]
async fn everything_within_the_bounds_goes_out_as_it_is() {
    // WIR-8
    let edge = edge();
    let mut node = Node::connect(&edge, "n1").await;
    let legal = [
        call("body"),
        TunnelCall { headers: headers(MAX_HEADERS, MAX_HEADER_BYTES), path: path(MAX_PATH), ..call("body") },
        TunnelCall { headers: headers(8, 4096), path: "/v1/ü?q=\u{20ac}".into(), ..call("body") },
    ];
    for call in legal {
        let TunnelCall { method, path, headers, .. } = call.clone();
        let (_, stream) = edge.submit_tunnel(to("only-a"), call).await.unwrap();
        let ToNode::Tunnel(request) = node.recv().await else { panic!("no tunnel") };
        assert_eq!((&request.method, request.path.expose(), request.headers.expose()), (&method, &path, &headers));
        let run = request.head.run;
        ToNode::Tunnel(request).check().unwrap();
        assert!(matches!(node.recv().await, ToNode::Chunk(_)));
        node.frame(run, 1, TunnelFrame::End);
        settle().await;
        drop(stream);
        assert_at_rest(&edge);
    }
}
