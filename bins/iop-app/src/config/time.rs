//! Decides how config and commands write points and spans of time: RFC 3339, and `90d`, `24h`, `15m`, `30s`.

use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::Deserialize;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

/// A point in time, to the second: Unix seconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(try_from = "String")]
pub struct Timestamp(pub u64);

/// What a time looks like, for whoever wrote another thing.
pub const EXAMPLE: &str = "2027-01-31T00:00:00Z";

impl Timestamp {
    /// Now, by the system's clock.
    #[must_use]
    pub fn now() -> Self {
        Self(SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()))
    }

    /// Reads RFC 3339, with any offset; not before 1970.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let time = OffsetDateTime::parse(text, &Rfc3339).ok()?;
        u64::try_from(time.unix_timestamp()).ok().map(Self)
    }

    /// So much later.
    #[must_use]
    pub const fn plus(self, span: Duration) -> Self {
        Self(self.0.saturating_add(span.as_secs()))
    }
}

impl TryFrom<String> for Timestamp {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        Self::parse(&text).ok_or_else(|| format!("`{}` is no RFC 3339 time", text.escape_debug()))
    }
}

impl fmt::Display for Timestamp {
    /// RFC 3339 in UTC.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let time = i64::try_from(self.0).ok().and_then(|unix| OffsetDateTime::from_unix_timestamp(unix).ok());
        match time.and_then(|time| time.format(&Rfc3339).ok()) {
            Some(text) => f.write_str(&text),
            None => write!(f, "9999-12-31T23:59:59Z"),
        }
    }
}

/// Reads a span: a whole number and one of `s`, `m`, `h`, `d`; `0` alone is none.
///
/// # Errors
/// A text for people.
pub fn parse_span(text: &str) -> Result<Duration, String> {
    let wrong = || format!("`{}` is no span of time; for example 90d, 24h, 15m, 30s or 0", text.escape_debug());
    if text == "0" {
        return Ok(Duration::ZERO);
    }
    let unit = text.chars().next_back().ok_or_else(wrong)?;
    let seconds = match unit {
        's' => 1,
        'm' => 60,
        'h' => 3_600,
        'd' => 86_400,
        _ => return Err(wrong()),
    };
    let number: u64 = text.strip_suffix(unit).and_then(|number| number.parse().ok()).ok_or_else(wrong)?;
    // A century is for ever.
    number.checked_mul(seconds).filter(|all| *all <= 36_525 * 86_400).map(Duration::from_secs).ok_or_else(wrong)
}

/// Reads a span from now, or a point in time.
///
/// # Errors
/// A text for people.
pub fn parse_end(text: &str) -> Result<Timestamp, String> {
    match Timestamp::parse(text) {
        Some(at) => Ok(at),
        None => parse_span(text)
            .map(|span| Timestamp::now().plus(span))
            .map_err(|_| format!("`{}` is neither a time like {EXAMPLE} nor a span like 90d", text.escape_debug())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_with_any_offset_and_written_in_utc() {
        // CRD-12
        for (text, unix) in [
            ("1970-01-01T00:00:00Z", Some(0)),
            ("2026-12-01T00:00:00Z", Some(1_796_083_200)),
            ("2026-12-01T01:30:00+01:30", Some(1_796_083_200)),
            ("2026-12-01T00:00:00.9Z", Some(1_796_083_200)),
            ("2026-12-01", None),
            ("2026-12-01 00:00:00", None),
            ("1969-12-31T23:59:59Z", None),
            ("tomorrow", None),
        ] {
            assert_eq!(Timestamp::parse(text).map(|time| time.0), unix, "{text}");
        }
        assert_eq!(Timestamp(1_796_083_200).to_string(), "2026-12-01T00:00:00Z");
        assert_eq!(Timestamp(u64::MAX).to_string(), "9999-12-31T23:59:59Z");
    }

    #[test]
    fn spans_are_whole_numbers_with_a_unit() {
        // BIN-3
        for (text, seconds) in
            [("90d", Some(7_776_000)), ("24h", Some(86_400)), ("15m", Some(900)), ("30s", Some(30)), ("0", Some(0))]
        {
            assert_eq!(parse_span(text).ok().map(|span| span.as_secs()), seconds, "{text}");
        }
        for text in ["", "d", "5", "-1d", "1.5h", "1w", "99999999999999999999d", "40000d", "ü"] {
            assert!(parse_span(text).is_err(), "{text}");
        }
        assert_eq!(parse_end(EXAMPLE).map(|at| at.to_string()), Ok(EXAMPLE.to_owned()));
        assert!(parse_end("soon").is_err_and(|text| text.contains(EXAMPLE)));
    }
}
