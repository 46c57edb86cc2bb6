//! Decides how `iop` talks to a running Edge: one request on one connection, and what each way to fail means.

use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::Bytes;
use http::header::{AUTHORIZATION, HOST};
use http::{HeaderValue, Method, Request, StatusCode, Uri};
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper_util::rt::TokioIo;
use iop_edge_core::token::{Token, TokenKind};
use iop_execution::Redacted;
use serde::de::DeserializeOwned;
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::admin::view::{ErrorView, RefusalView};
use crate::config::edge::ADMIN_PORT;
use crate::config::secret::read_secret;
use crate::exit::{Exit, Failure};

/// Variable that holds the admin key. A flag for it would be visible to other users of the machine.
pub const KEY_VARIABLE: &str = "IOP_ADMIN_KEY";
/// Where an Edge is, when nobody says.
pub const DEFAULT_ADMIN: &str = "http://127.0.0.1:9190";
/// Where `iop init` writes the admin key.
pub const KEY_FILE: &str = "admin.key";
/// For a whole exchange. A reload reads files and checks certificates.
const PATIENCE: Duration = Duration::from_secs(15);
/// Longest answer that is read: a thousand Nodes with ten providers each are about 4 MiB.
const MAX_ANSWER_BYTES: usize = 64 << 20;

/// Where the Edge is and how it is opened: flags of every command that talks to one.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Edge")]
pub struct AdminOptions {
    /// The Edge's admin listener, `listen.admin` of its edge.yaml
    #[arg(long, env = "IOP_ADMIN", default_value = DEFAULT_ADMIN, value_name = "URL", display_order = 800)]
    pub admin: String,
    /// File with the admin key; without it IOP_ADMIN_KEY is the key itself [default: admin.key]
    #[arg(long, value_name = "FILE", display_order = 801)]
    pub key_file: Option<PathBuf>,
    /// Print the answer as JSON
    #[arg(long, display_order = 802)]
    pub json: bool,
}

/// The admin API of one Edge.
#[derive(Debug)]
pub struct AdminClient {
    host: String,
    port: u16,
    key: Redacted<String>,
    /// Where the key is from, for people.
    source: String,
}

/// Why a call failed.
#[derive(Debug)]
pub enum CallError {
    /// The Edge refused it and said why.
    Refused {
        /// Status of the answer.
        status: StatusCode,
        /// Why.
        error: Box<ErrorView>,
    },
    /// Nobody listens there.
    NoEdge(Failure),
    /// Nothing that is an Edge answered, or not in time: it may have done what was asked.
    Failed(Failure),
}

impl From<Failure> for CallError {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

impl AdminClient {
    /// For these flags, with the key of the file, the variable, or the usual file.
    ///
    /// # Errors
    /// [`Failure`] with the next step.
    pub fn new(options: &AdminOptions) -> Result<Self, Failure> {
        let variable = std::env::var(KEY_VARIABLE).ok().filter(|key| !key.is_empty());
        Self::with_key(options, variable, Path::new(KEY_FILE))
    }

    fn with_key(options: &AdminOptions, variable: Option<String>, usual: &Path) -> Result<Self, Failure> {
        let (host, port) = address(&options.admin)?;
        let from_file = |path: &Path| {
            let key = read_secret(path).map_err(|error| {
                Failure::usage(format!("the admin key: {error}"))
                    .hint("`iop init` writes it to admin.key beside edge.yaml")
            })?;
            Ok::<_, Failure>((key, path.display().to_string()))
        };
        let (key, source) = match (&options.key_file, variable) {
            (Some(path), _) => from_file(path)?,
            (None, Some(key)) => (key.trim().to_owned(), KEY_VARIABLE.to_owned()),
            (None, None) if usual.exists() => from_file(usual)?,
            (None, None) => {
                let message =
                    format!("there is no admin key: no {} here, and {KEY_VARIABLE} is not set", usual.display());
                return Err(Failure::usage(message).hint(
                    "run it where `iop init` wrote admin.key, or give --key-file FILE; \
                     `iop-edge hash --new admin` makes a key for an Edge that has none",
                ));
            }
        };
        if Token::parse(TokenKind::Admin, &key).is_none() {
            let hint = if key.starts_with("iopk_") {
                "it holds an API key of a client; the admin key begins with iopa_"
            } else {
                "it must be one line: iopa_<8 characters>_<43 characters>"
            };
            return Err(Failure::usage(format!("{source} holds no admin key")).hint(hint));
        }
        Ok(Self { host, port, key: Redacted::new(key), source })
    }

    /// Asks, and reads the answer as JSON text.
    ///
    /// # Errors
    /// [`CallError`].
    ///
    /// # Cancel safety
    /// Dropping the future closes the connection; the Edge may have done what was asked.
    pub async fn text(&self, method: Method, path: &str) -> Result<Bytes, CallError> {
        match timeout(PATIENCE, self.exchange(method, path)).await {
            Ok(done) => done,
            Err(_) => Err(Failure::fatal(format!(
                "the Edge at {} did not answer within {} s",
                self.authority(),
                PATIENCE.as_secs()
            ))
            .into()),
        }
    }

    /// Asks, and reads the answer.
    ///
    /// # Errors
    /// As [`text`](Self::text).
    pub async fn ask<T: DeserializeOwned>(&self, method: Method, path: &str) -> Result<T, CallError> {
        self.read(&self.text(method, path).await?).map_err(Into::into)
    }

    /// Reads an answer.
    ///
    /// # Errors
    /// [`Failure`] when it has another shape.
    pub fn read<T: DeserializeOwned>(&self, text: &[u8]) -> Result<T, Failure> {
        serde_json::from_slice(text).map_err(|error| {
            Failure::fatal(format!("the answer of {} can't be read: {error}", self.authority()))
                .hint("is `iop` older than the Edge? `iop --version`, `iop status --json`")
        })
    }

    fn authority(&self) -> String {
        if self.host.contains(':') {
            format!("[{}]:{}", self.host, self.port)
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }

    async fn exchange(&self, method: Method, path: &str) -> Result<Bytes, CallError> {
        let authority = self.authority();
        let socket = TcpStream::connect((self.host.as_str(), self.port)).await.map_err(|error| {
            let failure = Failure::fatal(format!("no Edge answers at {authority}: {error}")).hint(
                "is it running? `iop-edge serve --config edge.yaml`. Another address: --admin URL, as `listen.admin` in edge.yaml",
            );
            match error.kind() {
                std::io::ErrorKind::ConnectionRefused => CallError::NoEdge(failure),
                _ => CallError::Failed(failure),
            }
        })?;
        let broken = |error: &dyn std::fmt::Display| {
            Failure::fatal(format!("the connection to {authority} broke: {error}")).hint("is that the admin listener?")
        };
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(socket)).await.map_err(|error| broken(&error))?;
        let exchange = async {
            let mut bearer =
                HeaderValue::try_from(format!("Bearer {}", self.key.expose())).map_err(|error| broken(&error))?;
            bearer.set_sensitive(true);
            let request = Request::builder()
                .method(method)
                .uri(format!("/admin/v1/{path}"))
                .header(HOST, &authority)
                .header(AUTHORIZATION, bearer)
                .body(Empty::<Bytes>::new())
                .map_err(|error| broken(&error))?;
            let answer = sender.send_request(request).await.map_err(|error| broken(&error))?;
            let status = answer.status();
            let body = Limited::new(answer.into_body(), MAX_ANSWER_BYTES).collect().await;
            Ok::<_, CallError>((status, body.map_err(|error| broken(&error))?.to_bytes()))
        };
        let mut exchange = std::pin::pin!(exchange);
        let (status, body) = tokio::select! {
            done = exchange.as_mut() => done?,
            // The answer may lie in buffers when its connection has ended.
            _ = connection => exchange.await?,
        };
        if status.is_success() {
            return Ok(body);
        }
        match serde_json::from_slice::<RefusalView>(&body) {
            Ok(refusal) => Err(CallError::Refused { status, error: Box::new(refusal.error) }),
            Err(_) => Err(Failure::fatal(format!(
                "what listens at {authority} has no admin API (it answered {})",
                status.as_u16()
            ))
            .hint("`iop up` has none; an Edge has it at `listen.admin` of its edge.yaml")
            .into()),
        }
    }

    /// What a failed call means for whoever typed the command.
    #[must_use]
    pub fn failure(&self, error: CallError) -> Failure {
        let (status, error) = match error {
            CallError::NoEdge(failure) | CallError::Failed(failure) => return failure,
            CallError::Refused { status, error } => (status, error),
        };
        let failure = Failure { exit: Exit::Fatal, message: error.message.clone(), hint: None };
        match error.code.as_str() {
            "invalid_key" | "missing_key" => {
                let message = format!("the Edge at {} has another admin key than {}", self.authority(), self.source);
                Failure::usage(message)
                    .hint("its hash is `admin.key_hash` in edge.yaml; --key-file FILE names the right key")
            }
            "unknown_node" => failure.hint("`iop nodes` lists them"),
            "unknown_run" => failure.hint("`iop runs` lists them"),
            "invalid_config" => Failure { exit: Exit::Usage, ..failure },
            _ if error.message.is_empty() => Failure::fatal(format!("the Edge answered {}", status.as_u16())),
            _ => failure,
        }
    }
}

/// Host and port of `http://host:port` or `host:port`.
fn address(url: &str) -> Result<(String, u16), Failure> {
    let wrong = |what: &str| {
        Failure::usage(format!("--admin: {what}")).hint(format!("for example --admin http://127.0.0.1:{ADMIN_PORT}"))
    };
    if url.starts_with("https://") {
        return Err(wrong("the admin listener has no TLS; through another machine use a tunnel such as ssh -L"));
    }
    let full = if url.contains("://") { url.to_owned() } else { format!("http://{url}") };
    let uri: Uri = full.parse().map_err(|_| wrong("that is no URL"))?;
    if uri.scheme_str() != Some("http") || !matches!(uri.path(), "" | "/") || uri.query().is_some() {
        return Err(wrong("it must be http://host:port and nothing after it"));
    }
    let host = uri.host().filter(|host| !host.is_empty()).ok_or_else(|| wrong("it has no host"))?;
    Ok((host.trim_matches(['[', ']']).to_owned(), uri.port_u16().unwrap_or(ADMIN_PORT)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testdir::TestDir;

    #[test]
    fn addresses_are_read_as_people_write_them() {
        // BIN-3
        for (url, host, port) in [
            ("http://127.0.0.1:9190", "127.0.0.1", 9190),
            ("http://127.0.0.1:9190/", "127.0.0.1", 9190),
            ("localhost:7", "localhost", 7),
            ("http://[::1]:7", "::1", 7),
            ("http://edge", "edge", 9190),
        ] {
            assert_eq!(address(url), Ok((host.to_owned(), port)), "{url}");
        }
        for url in ["https://127.0.0.1:9190", "http://x:1/admin", "ftp://x", "", "http://x:1?a=b", "http://a b"] {
            let failure = address(url).unwrap_err();
            assert!(failure.exit == Exit::Usage && failure.hint.is_some(), "{url}");
        }
    }

    #[test]
    fn the_key_is_of_the_flag_then_the_variable_then_the_usual_file() {
        // BIN-3, SEC-4
        let dir = TestDir::new();
        let key = || Token::generate(TokenKind::Admin).unwrap().reveal();
        let (flag, variable, usual) = (key(), key(), key());
        let (flag_file, usual_file) = (dir.write("flag", &flag), dir.write("admin.key", &format!("{usual}\n")));
        let options = |key_file| AdminOptions { admin: "127.0.0.1:1".to_owned(), key_file, json: false };
        let chosen = |file, variable: Option<&String>, usual: &Path| {
            AdminClient::with_key(&options(file), variable.cloned(), usual).map(|client| client.key.expose().clone())
        };
        assert_eq!(chosen(Some(flag_file.clone()), Some(&variable), &usual_file), Ok(flag));
        assert_eq!(chosen(None, Some(&variable), &usual_file), Ok(variable));
        assert_eq!(chosen(None, None, &usual_file), Ok(usual.clone()));
        let none = chosen(None, None, &dir.path().join("nowhere")).unwrap_err();
        assert!(none.exit == Exit::Usage && none.to_string().contains("iop init"), "{none}");
        let client = Token::generate(TokenKind::ApiKey).unwrap().reveal();
        let wrong = chosen(None, Some(&client), &usual_file).unwrap_err().to_string();
        assert!(wrong.contains("API key of a client") && !wrong.contains(&client[14..]), "{wrong}");
        assert!(
            chosen(Some(dir.path().join("nowhere")), Some(&usual), &usual_file).is_err(),
            "the flag is not guessed around"
        );
    }
}
