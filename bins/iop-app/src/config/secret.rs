//! Decides how a config file refers to what must not stand in it: `${NAME}`, `file:PATH`, `env:NAME`, `command:PROGRAM`.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

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

/// A text as it may be shown: a mistake of punctuation can make a key of the file out of a token.
pub(crate) fn without_tokens(text: &str) -> &str {
    let is_token = |prefix: &&str| text.contains(prefix);
    if ["iopn_", "iopk_", "iopa_", "sk-"].iter().any(is_token) { "(a text with a token in it)" } else { text }
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

/// Longest time a program may take to tell a secret.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(10);
/// Time between looks at a program that runs.
const COMMAND_TICK: Duration = Duration::from_millis(10);

/// Where the Edge finds a secret of its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SecretReference {
    /// An environment variable of the Edge.
    Env(String),
    /// A file; relative ones start at the config's directory.
    File(String),
    /// A program and its arguments, without a shell. The first line of what it prints is the secret.
    Command(Vec<String>),
}

/// What a secret may be written as.
const SECRET_FORMS: &str = "`file:PATH`, `env:NAME` or `command:PROGRAM ARGS`";

impl SecretReference {
    /// Reads a reference; a text that is none may be the secret itself, so that no error repeats it.
    ///
    /// # Errors
    /// A text for people.
    pub fn parse(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            Some(("env", name)) if is_variable_name(name) => Ok(Self::Env(name.to_owned())),
            Some(("file", path)) if !path.is_empty() => Ok(Self::File(path.to_owned())),
            Some(("command", words)) if !words.trim().is_empty() => {
                Ok(Self::Command(words.split_whitespace().map(str::to_owned).collect()))
            }
            Some(_) | None => Err(format!("it must be {SECRET_FORMS}")),
        }
    }

    /// The secret: the first line that is not empty, without the space around it.
    ///
    /// # Errors
    /// A text for people that names the place and holds nothing of what is there.
    pub fn resolve(&self, base: &Path) -> Result<Vec<u8>, String> {
        let (place, told) = match self {
            Self::Env(name) => (
                format!("the environment variable {name}"),
                std::env::var(name).map_err(|_| format!("the environment variable {name} is not set"))?.into_bytes(),
            ),
            Self::File(path) => {
                let path = resolve_path(base, path);
                let shown = path.display().to_string();
                let file = std::fs::File::open(&path).map_err(|error| format!("can't read {shown}: {error}"))?;
                (shown.clone(), read_all(file).map_err(|error| format!("can't read {shown}: {error}"))?)
            }
            Self::Command(words) => {
                let program = words.first().map(String::as_str).unwrap_or_default().to_owned();
                let told = run(words, base, COMMAND_TIMEOUT).map_err(|error| format!("`{program}`: {error}"))?;
                (format!("the output of `{program}`"), told)
            }
        };
        first_line(told).ok_or_else(|| format!("{place} is empty, or larger than {MAX_SECRET_BYTES} bytes"))
    }
}

/// At most one byte more than a secret may have, in one piece of memory.
fn read_all(from: impl Read) -> std::io::Result<Vec<u8>> {
    let mut told = Vec::with_capacity(usize::try_from(MAX_SECRET_BYTES).unwrap_or(usize::MAX) + 2);
    from.take(MAX_SECRET_BYTES + 1).read_to_end(&mut told)?;
    Ok(told)
}

/// The first line that is not empty, in the memory it is in.
fn first_line(mut told: Vec<u8>) -> Option<Vec<u8>> {
    if told.len() as u64 > MAX_SECRET_BYTES {
        return None;
    }
    let begin = told.iter().position(|byte| !byte.is_ascii_whitespace())?;
    let rest = told.get(begin..)?;
    let line = rest.iter().position(|byte| matches!(byte, b'\n' | b'\r')).unwrap_or(rest.len());
    told.truncate(begin + line);
    told.drain(..begin);
    while told.last().is_some_and(u8::is_ascii_whitespace) {
        told.pop();
    }
    Some(told)
}

fn run(words: &[String], base: &Path, limit: Duration) -> Result<Vec<u8>, String> {
    let (program, arguments) = words.split_first().ok_or("no program is named")?;
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    if !base.as_os_str().is_empty() {
        command.current_dir(base);
    }
    let mut child = command.spawn().map_err(|error| format!("can't be started: {error}"))?;
    let output = child.stdout.take();
    // Its output is read beside it: it must not wait for a reader. And nobody waits for the reader for ever: what the
    // program started may hold its output open when it has ended itself.
    let (tell, told) = mpsc::sync_channel(1);
    std::thread::spawn(move || {
        // Nobody listens when it took too long.
        let _late = tell.send(output.map_or_else(|| Ok(Vec::new()), read_all));
    });
    let due = Instant::now() + limit;
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break Ok(status),
            Ok(None) if Instant::now() < due => std::thread::sleep(COMMAND_TICK),
            Ok(None) => break Err(format!("did not end within {} s", limit.as_secs())),
            Err(error) => break Err(error.to_string()),
        }
    };
    let status = status.inspect_err(|_| {
        // Whether it could be ended changes nothing here.
        let _ = child.kill();
        let _ = child.wait();
    })?;
    if !status.success() {
        return Err(format!("failed ({status})"));
    }
    match told.recv_timeout(due.saturating_duration_since(Instant::now())) {
        Ok(Ok(told)) => Ok(told),
        Err(mpsc::RecvTimeoutError::Timeout) => {
            Err(format!("did not close its output within {} s: a process that it started holds it", limit.as_secs()))
        }
        Ok(Err(_)) | Err(mpsc::RecvTimeoutError::Disconnected) => Err("its output can't be read".to_owned()),
    }
}

/// Checks a reference to a secret of the Edge. What else stands there may be the secret, so it is not repeated.
pub(crate) fn check_secret(text: &str, name: &str, at: Position, problems: &mut Problems) {
    if SecretReference::parse(text).is_err() {
        let suggestion = match variable(text) {
            Some(variable) => format!("{name}: \"env:{variable}\""),
            None => format!("the secret itself never stands here: put it in a file and write {name}: \"file:PATH\""),
        };
        problems.error(at, format!("`{name}` must be {SECRET_FORMS}"), Some(suggestion));
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

/// Warns of a secret that is nobody's own.
pub(crate) fn readable_by_all(path: &Path, at: Position, problems: &mut Problems) {
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let mode = std::fs::metadata(path).map_or(0, |metadata| metadata.permissions().mode());
        if mode & 0o004 != 0 {
            let message = format!("everybody on this machine can read {}", path.display());
            problems.warning(at, message, Some(format!("chmod 600 {}", path.display())));
        }
    }
    #[cfg(not(unix))]
    let _ = (path, at, problems);
}

#[cfg(test)]
mod tests {
    use iop_edge_core::token::{Token, TokenKind};

    use super::*;

    #[cfg(unix)]
    #[test]
    fn a_program_whose_child_keeps_its_output_open_is_not_waited_for() {
        // CFG-2, CRD-11
        let dir = crate::testdir::TestDir::new();
        dir.write("hold.sh", "echo sk-1\nsleep 4 &\n");
        let words = ["sh".to_owned(), "hold.sh".to_owned()];
        let error = run(&words, dir.path(), Duration::from_secs(1)).unwrap_err();
        assert!(error.contains("did not close its output"), "{error}");
        dir.write("hold.sh", "echo sk-1\n");
        assert_eq!(run(&words, dir.path(), COMMAND_TIMEOUT).unwrap(), b"sk-1\n");
    }

    #[test]
    fn only_a_whole_text_is_a_variable() {
        // CFG-1
        assert_eq!(variable("${A_1}"), Some("A_1"));
        for text in ["$A", "x${A}", "${A}x", "${}", "${1A}", "${A-B}", "A"] {
            assert_eq!(variable(text), None, "{text}");
        }
    }

    #[test]
    fn a_secret_is_a_reference_and_comes_without_the_line_around_it() {
        // CRD-11
        let base = crate::testdir::TestDir::new();
        std::fs::write(base.path().join("key"), "\n  sk-1 \nmore\n").unwrap();
        let resolve = |text: &str| SecretReference::parse(text).and_then(|secret| secret.resolve(base.path()));
        assert_eq!(resolve("file:key").unwrap(), b"sk-1");
        assert_eq!(resolve("command:cat key").unwrap(), b"sk-1");
        std::fs::write(base.path().join("empty"), " \n").unwrap();
        std::fs::write(base.path().join("huge"), vec![b'k'; usize::try_from(MAX_SECRET_BYTES).unwrap() + 1]).unwrap();
        for (text, part) in [
            ("file:none", "can't read"),
            ("file:empty", "is empty"),
            ("file:huge", "larger than 65536"),
            ("env:IOP_TEST_NOT_SET", "is not set"),
            ("command:false", "failed"),
            ("command:/no/such/program", "can't be started"),
            ("command: ", "must be `file:PATH`"),
            ("sk-SENTINEL", "must be `file:PATH`"),
        ] {
            let error = resolve(text).unwrap_err();
            assert!(error.contains(part) && !error.contains("SENTINEL"), "{text}: {error}");
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
