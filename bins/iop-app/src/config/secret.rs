//! Decides how a config file refers to what must not stand in it: `${NAME}`, `file:PATH`, `env:NAME`.

use std::path::{Path, PathBuf};

use iop_edge_core::token::TokenHash;

use super::problem::{Position, Problems};

/// Largest file that holds a secret, in bytes.
pub const MAX_SECRET_BYTES: u64 = 64 << 10;

/// The variable that `${NAME}` names, when the whole text is that.
#[must_use]
pub fn variable(text: &str) -> Option<&str> {
    let name = text.strip_prefix("${")?.strip_suffix('}')?;
    is_variable_name(name).then_some(name)
}

fn is_variable_name(name: &str) -> bool {
    !name.is_empty()
        && !name.starts_with(|c: char| c.is_ascii_digit())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
}

/// How a plain token in a config file becomes a hash.
const CONVERT: &str =
    "config holds hashes only: run `iop-edge hash`, paste the token into it, and write what it prints";

/// Checks `sha256:…` or `file:…`; a plain token is told how to become a hash, and is never repeated.
pub(crate) fn check_hash(text: &str, name: &str, at: Position, problems: &mut Problems) {
    if text.starts_with("file:") || TokenHash::parse(text).is_some() {
        return;
    }
    if ["iopn_", "iopk_", "iopa_", "sk-"].iter().any(|prefix| text.starts_with(prefix)) {
        problems.error(at, format!("`{name}` holds a plain token"), Some(CONVERT.to_owned()));
    } else if text.starts_with("sha256:") {
        problems.error(at, format!("`{name}` must be `sha256:` and 64 hex digits"), Some(CONVERT.to_owned()));
    } else {
        problems.error(at, format!("`{name}` is not a hash"), Some(CONVERT.to_owned()));
    }
}

/// Checks `env:NAME` or `file:PATH`, which the Node resolves. What else stands there may be a key, so it is not repeated.
pub(crate) fn check_reference(text: &str, name: &str, at: Position, problems: &mut Problems) {
    let good = match text.split_once(':') {
        Some(("env", variable)) => is_variable_name(variable),
        Some(("file", path)) => !path.is_empty(),
        Some(_) | None => false,
    };
    if good {
        return;
    }
    let suggestion = match variable(text) {
        Some(variable) => format!("the Node resolves it, from its own environment: {name}: \"env:{variable}\""),
        None => format!("the key itself stays on the Node: {name}: \"env:NAME\" or {name}: \"file:PATH\""),
    };
    problems.error(at, format!("`{name}` must be `env:NAME` or `file:PATH`"), Some(suggestion));
}

/// A path from a config file: relative ones start at the file's own directory.
#[must_use]
pub fn resolve_path(base: &Path, path: &str) -> PathBuf {
    base.join(path)
}

/// The first line of a small file, without the space around it.
///
/// # Errors
/// A text for people that names the file and holds none of its content.
pub fn read_secret(path: &Path) -> Result<String, String> {
    let shown = path.display();
    let size = std::fs::metadata(path).map_err(|error| format!("can't read {shown}: {error}"))?.len();
    if size > MAX_SECRET_BYTES {
        return Err(format!("{shown} is too large for a secret ({size} bytes)"));
    }
    let text = std::fs::read_to_string(path).map_err(|error| format!("can't read {shown}: {error}"))?;
    match text.lines().map(str::trim).find(|line| !line.is_empty()) {
        Some(line) => Ok(line.to_owned()),
        None => Err(format!("{shown} is empty")),
    }
}

/// The bytes of a `hash` or `token_hash` value: `sha256:…` itself, or the first line of the file it names.
///
/// # Errors
/// A text for people, without the value.
pub fn resolve_hash(base: &Path, text: &str) -> Result<TokenHash, String> {
    match text.strip_prefix("file:") {
        Some(path) => {
            let path = resolve_path(base, path);
            let line = read_secret(&path)?;
            TokenHash::parse(&line)
                .ok_or_else(|| format!("{} does not hold `sha256:` and 64 hex digits", path.display()))
        }
        None => TokenHash::parse(text).ok_or_else(|| "not a hash".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use iop_edge_core::token::{Token, TokenKind};

    use super::*;

    #[test]
    fn only_a_whole_text_is_a_variable() {
        // CFG-1
        assert_eq!(variable("${A_1}"), Some("A_1"));
        for text in ["$A", "x${A}", "${A}x", "${}", "${1A}", "${A-B}", "A"] {
            assert_eq!(variable(text), None, "{text}");
        }
    }

    #[test]
    fn a_plain_token_is_refused_with_the_command_and_never_repeated() {
        // REG-6
        let token = Token::generate(TokenKind::Node).unwrap().reveal();
        let mut problems = Problems::of("edge.yaml");
        check_hash(&token, "token_hash", Position::default(), &mut problems);
        check_hash("hunter2", "token_hash", Position::default(), &mut problems);
        check_reference("sk-abc123", "bearer", Position::default(), &mut problems);
        let text = problems.to_string();
        assert!(text.contains("iop-edge hash"), "{text}");
        assert!(!text.contains(&token) && !text.contains("hunter2") && !text.contains("abc123"), "{text}");
        assert_eq!(problems.counts(), (3, 0));
    }
}
