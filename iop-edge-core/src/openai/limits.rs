//! Decides how a caller is told where its key stands: the `x-ratelimit-…` headers of OpenAI (CRD-12).

use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue};

use crate::rate_limit::{Standing, Standings};

/// Adds the headers of the limits that the key has.
pub(crate) fn tell(headers: &mut HeaderMap, standings: &Standings) {
    let Standings { requests, tokens } = standings;
    if let Some(standing) = requests {
        let [limit, remaining, reset] =
            ["x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests"];
        add(headers, standing, [limit, remaining, reset]);
    }
    if let Some(standing) = tokens {
        let [limit, remaining, reset] =
            ["x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens"];
        add(headers, standing, [limit, remaining, reset]);
    }
}

fn add(headers: &mut HeaderMap, standing: &Standing, [limit, remaining, reset]: [&'static str; 3]) {
    headers.insert(HeaderName::from_static(limit), HeaderValue::from(standing.limit));
    headers.insert(HeaderName::from_static(remaining), HeaderValue::from(standing.remaining));
    if let Ok(value) = HeaderValue::try_from(duration(standing.reset)) {
        headers.insert(HeaderName::from_static(reset), value);
    }
}

/// As OpenAI writes it, and Go: `1m0.5s`, `12s`, `820ms`, `0s`.
fn duration(duration: Duration) -> String {
    let ms = u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
    if ms == 0 {
        return "0s".to_owned();
    }
    if ms < 1_000 {
        return format!("{ms}ms");
    }
    let (minutes, seconds, rest) = (ms / 60_000, ms / 1_000 % 60, ms % 1_000);
    let minutes = if minutes > 0 { format!("{minutes}m") } else { String::new() };
    let rest = format!(".{rest:03}");
    format!("{minutes}{seconds}{}s", rest.trim_end_matches('0').trim_end_matches('.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_look_as_openai_writes_them() {
        // CRD-12
        for (ms, want) in
            [(0, "0s"), (17, "17ms"), (1_000, "1s"), (8_640, "8.64s"), (60_000, "1m0s"), (61_005, "1m1.005s")]
        {
            assert_eq!(duration(Duration::from_millis(ms)), want);
        }
    }
}
