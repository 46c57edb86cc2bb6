//! Decides what llama.cpp's slots, or its counters, say.
//!
//! Both are told by the thread that decodes, so an answer alone means that it is not stuck; it does not mean that it makes
//! tokens. A slot that was released is no progress either. The model of a request is ignored by a server that has one.

use http::{Method, StatusCode};

use super::super::OpenAiCompat;
use super::metrics::{samples, whole};
use super::{Answer, Look, Mark, NoAnswer, Reading, ask};
use crate::json::{Kind, Scanned, Scanner};

pub(super) async fn look(adapter: &OpenAiCompat) -> Look {
    match ask(adapter, Method::GET, "/slots", "").await {
        Ok(answer) if is_loading(&answer) => return Look::Loading,
        Ok(answer) if answer.status.is_success() => {
            if let Some(reading) = slots(&answer.body) {
                return Look::Seen(reading);
            }
        }
        // Turned off, or for another key: perhaps the counters are not.
        Ok(_) => {}
        Err(NoAnswer::Refused) => return Look::Refused,
        Err(NoAnswer::Broken) => return Look::Nothing,
    }
    match ask(adapter, Method::GET, "/metrics", "").await {
        Ok(answer) if is_loading(&answer) => Look::Loading,
        Ok(answer) if answer.status.is_success() => {
            let places = adapter.found().slots.map_or(1, std::num::NonZeroU32::get);
            counters(&answer.body, places).map_or(Look::Nothing, Look::Seen)
        }
        Ok(_) | Err(NoAnswer::Broken) => Look::Nothing,
        Err(NoAnswer::Refused) => Look::Refused,
    }
}

/// It says 503 to everything while it loads its model, and at no other time.
pub(super) fn is_loading(answer: &Answer) -> bool {
    answer.status == StatusCode::SERVICE_UNAVAILABLE
        && memchr::memmem::find(&answer.body, b"unavailable_error").is_some()
}

fn slots(body: &[u8]) -> Option<Reading> {
    let mut reading = Reading { marks: Vec::new(), busy: false, free: false };
    let mut read = || -> Scanned<()> {
        let mut scan = Scanner::new(body);
        if scan.peek()? != Kind::Array {
            return Err(crate::json::NotJson);
        }
        scan.array(|scan| {
            let slot = slot(scan)?;
            reading.busy |= slot.processing;
            reading.free |= !slot.processing;
            if slot.processing {
                reading.marks.push(Mark { who: slot.id, task: slot.task, count: slot.count });
            }
            Ok(())
        })?;
        scan.end()
    };
    read().ok().filter(|()| reading.busy || reading.free)?;
    Some(reading)
}

#[derive(Default)]
struct Slot {
    id: u64,
    task: u64,
    /// Tokens it has made, and those of the prompt that it has read, where it tells.
    count: u64,
    processing: bool,
}

fn slot(scan: &mut Scanner<'_>) -> Scanned<Slot> {
    let mut slot = Slot::default();
    scan.object(|scan, key| {
        match key {
            b"id" => slot.id = scan.count()?.unwrap_or(0),
            b"id_task" => slot.task = scan.count()?.unwrap_or(0),
            b"is_processing" => slot.processing = scan.raw()? == b"true",
            b"n_decoded" | b"n_past" | b"n_prompt_tokens_processed" => slot.count += scan.count()?.unwrap_or(0),
            // An object, in newer versions a list of them.
            b"next_token" => match scan.peek()? {
                Kind::Object => slot.count += decoded(scan)?,
                Kind::Array => scan.array(|scan| {
                    if scan.peek()? == Kind::Object {
                        slot.count += decoded(scan)?;
                        Ok(())
                    } else {
                        scan.skip()
                    }
                })?,
                _ => scan.skip()?,
            },
            _ => scan.skip()?,
        }
        Ok(())
    })?;
    Ok(slot)
}

fn decoded(scan: &mut Scanner<'_>) -> Scanned<u64> {
    let mut count = 0;
    scan.object(|scan, key| {
        match key {
            b"n_decoded" => count = scan.count()?.unwrap_or(0),
            _ => scan.skip()?,
        }
        Ok(())
    })?;
    Ok(count)
}

fn counters(text: &[u8], places: u32) -> Option<Reading> {
    let (mut progress, mut processing, mut deferred) = (None, 0.0, 0.0);
    for sample in samples(text) {
        match sample.name.strip_prefix("llamacpp:") {
            Some("requests_processing") => processing = sample.value,
            Some("requests_deferred") => deferred = sample.value,
            Some("tokens_predicted_total" | "prompt_tokens_total" | "n_decode_total") => {
                progress = Some(progress.unwrap_or(0.0) + sample.value);
            }
            Some(_) | None => {}
        }
    }
    Some(Reading {
        marks: vec![Mark { who: 0, task: 0, count: whole(progress?) }],
        busy: processing > 0.0 || deferred > 0.0,
        free: deferred == 0.0 && processing < f64::from(places),
    })
}
