//! Settings that are replaced while requests run, and what a key says of its caller.

use super::*;
use crate::token::{Token, TokenKind};

fn key_of(token: &Token, name: &str) -> ApiKeyRecord {
    let principal = iop_execution::Principal::new(name).unwrap();
    ApiKeyRecord::new(token.id().clone(), token.hash(), principal, AllowedModels::All)
}

fn asked_by(token: &Token, body: &str) -> Request<Full<Bytes>> {
    let mut request = post(body);
    request.headers_mut().insert("authorization", format!("Bearer {}", token.reveal()).parse().unwrap());
    request
}

#[tokio::test(start_paused = true)]
async fn a_request_keeps_the_settings_it_began_with_and_the_next_one_has_the_new_ones() {
    // CFG-2
    let (old, new) = (Token::generate(TokenKind::ApiKey).unwrap(), Token::generate(TokenKind::ApiKey).unwrap());
    let keys = |record| Arc::new(ApiKeys::records([record]).unwrap());
    let chunk = "data: {\"model\":\"org/target\",\"choices\":[{\"delta\":{\"content\":\"x\"}}]}\n\n";
    let ((frames, reply), second) = (stepped(), tunnel([sse(), content(chunk), done()]));
    let rig = Rig::with([reply, second], |config| config.with_keys(keys(key_of(&old, "old"))));
    frames.send(sse()).unwrap();
    frames.send(content(chunk)).unwrap();
    let running = rig.send(asked_by(&old, STREAM)).await;
    assert_eq!(running.status(), 200);

    let later = Arc::new(Records::default());
    let mut config = OpenAiConfig::default().with_keys(keys(key_of(&new, "new")));
    config = config.with_response_model(ResponseModel::Target);
    rig.service.replace_config(config.with_observer(Arc::clone(&later) as Arc<dyn RequestObserver>));

    assert_eq!(rig.send(asked_by(&old, STREAM)).await.status(), 401, "the old key is gone");
    frames.send(content(chunk)).unwrap();
    frames.send(done()).unwrap();
    drop(frames);
    let (_, text) = whole(running).await;
    assert_eq!(text.matches("\"model\":\"m\"").count(), 2, "its keys and names are the old ones to its end: {text}");
    assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
    assert_eq!(rig.record().principal.map(|name| name.to_string()).as_deref(), Some("old"));

    let (status, text) = whole(rig.send(asked_by(&new, STREAM)).await).await;
    assert!(status == 200 && text.contains("org/target"), "{text}");
    assert_eq!(later.0.lock().unwrap().len(), 2, "the refused one and the answered one");
}

#[tokio::test(start_paused = true)]
async fn a_clone_of_the_service_has_the_new_settings_too() {
    // CFG-2: every connection has a clone
    let rig = Rig::new([]);
    let clone = rig.service.clone();
    rig.service.replace_config(OpenAiConfig::default().with_keys(Arc::new(ApiKeys::fixed("k"))));
    assert_eq!(clone.answer(get("/v1/models")).await.status(), 401);
    assert!(!clone.config().keys.is_open());
}

#[tokio::test(start_paused = true)]
async fn the_priority_of_a_key_goes_to_the_queue() {
    // QUE-1
    let (plain, urgent) = (Token::generate(TokenKind::ApiKey).unwrap(), Token::generate(TokenKind::ApiKey).unwrap());
    let records = [key_of(&plain, "plain"), key_of(&urgent, "urgent").with_priority(-7)];
    let refused = || Reply::Refuse(SubmitError::Unavailable);
    let rig =
        Rig::with([refused(), refused()], |config| config.with_keys(Arc::new(ApiKeys::records(records).unwrap())));
    for (key, priority) in [(&plain, 0), (&urgent, -7)] {
        rig.send(asked_by(key, CHAT)).await;
        assert_eq!(rig.script.seen.lock().unwrap().pop().unwrap().request.priority, priority);
    }
}
