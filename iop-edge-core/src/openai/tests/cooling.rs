//! The wait a provider asks for, through a real Edge: one reading of it for the client and for the queue.

use iop_wire::link::memory::memory_link;
use iop_wire::{Sequenced, ToEdge, ToNode};

use super::*;
use crate::edge::Edge;
use crate::state::tests::{catalog, hello, providers_of, ready, register};

/// What the client of a provider that answers so is told in milliseconds, and for how long the provider is left alone.
async fn asked_to_wait(status: u16, header: &'static str, value: &str) -> (Option<String>, Option<Duration>) {
    let edge = Edge::builder(catalog()).build();
    tokio::spawn(edge.drive());
    let (for_edge, for_node) = memory_link();
    tokio::spawn(edge.attach(for_edge));
    let (say, said) = mpsc::unbounded_channel();
    let said = stream::unfold((1, said), |(seq, mut said)| async move {
        let message: ToEdge = said.recv().await?;
        Some((Sequenced { seq, message }, (seq + 1, said)))
    });
    let mut heard = for_node.start(Box::pin(said));
    let mut request = async |wanted: fn(&ToNode) -> bool| loop {
        let message = heard.next().await.unwrap().unwrap().message;
        if wanted(&message) {
            return message;
        }
    };
    say.send(ToEdge::Hello(hello())).unwrap();
    say.send(ToEdge::Register(register("n1"))).unwrap();
    request(|message| matches!(message, ToNode::RegisterResponse(_))).await;
    say.send(ToEdge::Ready(ready("n1", 7, providers_of("n1")))).unwrap();
    request(|message| matches!(message, ToNode::ReadyResponse(_))).await;

    let mut service = OpenAiService::new(Arc::new(edge.clone()), OpenAiConfig::default());
    let asking = tokio::spawn(tower_service::Service::call(&mut service, post(&CHAT.replace("\"m\"", "\"only-a\""))));
    let message = request(|message| matches!(message, ToNode::Tunnel(_))).await;
    let ToNode::Tunnel(dispatched) = message else { unreachable!("it was looked at") };
    let run = dispatched.head.run;
    let mut headers = HeaderMap::new();
    headers.insert(header, value.parse().unwrap());
    say.send(ToEdge::Accepted(run)).unwrap();
    say.send(ToEdge::Frame(run, 1, TunnelFrame::Head(TunnelHead { status: status.try_into().unwrap(), headers })))
        .unwrap();
    say.send(ToEdge::Frame(run, 2, TunnelFrame::End)).unwrap();
    let Ok(response) = asking.await.unwrap();
    let told = response.headers().get("retry-after-ms").map(|wait| wait.to_str().unwrap().to_owned());
    (told, edge.snapshot().provider(&ProviderId::new("a").unwrap()).unwrap().cooling)
}

#[tokio::test(start_paused = true)]
async fn a_provider_is_left_alone_for_as_long_as_it_asked_in_any_unit() {
    // SEL-4, API-5
    let ms = |ms| Some(Duration::from_millis(ms));
    assert_eq!(asked_to_wait(429, "retry-after", "2").await, (Some("2000".into()), ms(2_000)));
    assert_eq!(asked_to_wait(429, "retry-after", "2.5").await, (Some("2500".into()), ms(2_500)));
    assert_eq!(asked_to_wait(429, "retry-after-ms", "2700").await, (Some("2700".into()), ms(2_700)));
    // By itself a conflict says nothing about the provider.
    assert_eq!(asked_to_wait(409, "retry-after-ms", "700").await, (None, ms(700)));
    assert_eq!(asked_to_wait(409, "retry-after", "soon").await, (None, None));
}
