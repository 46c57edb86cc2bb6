//! Decides what the directory of one Node of a managed fleet holds: all that the Node needs, and nothing else.

use iop_node_core::AllowUpstream;
use iop_wire::WorkloadIdentity;

use super::File;
use crate::certs::PemPair;
use crate::issue::record;

/// The Node's certificate.
pub(crate) const CERT: &str = "cert.pem";
/// Its private key.
pub(crate) const KEY: &str = "key.pem";
/// Its token.
pub(crate) const TOKEN: &str = "node.token";

/// One Node as its directory has it.
#[derive(Debug)]
pub(crate) struct NodeDirectory<'a> {
    /// Where it dials: host and port.
    pub(crate) authority: String,
    /// The Edge that it talks to.
    pub(crate) edge: &'a WorkloadIdentity,
    /// PEM of the CA of the Edge's certificate.
    pub(crate) ca: &'a str,
    /// Its certificate.
    pub(crate) pair: &'a PemPair,
    /// Backends of its providers.
    pub(crate) backends: Vec<&'a str>,
}

impl NodeDirectory<'_> {
    /// Its files but for the token, by names that start in the directory.
    pub(crate) fn files(&self) -> Vec<File> {
        vec![
            File::open("ca.pem", self.ca),
            File::open(CERT, &self.pair.cert),
            File::secret(KEY, self.pair.key.expose()),
            File::open("node.yaml", self.node_yaml()),
            File::open("node.env", self.node_env()),
        ]
    }

    fn node_yaml(&self) -> String {
        format!(
            "# For `iop-node serve --config node.yaml`. Paths start at this file.
edge: \"https://{}\"
identity: \"{}\"      # no other Edge is talked to
token_file: {TOKEN}
tls: {{ ca: ca.pem, cert: {CERT}, key: {KEY} }}
reconnect: {{ max_attempts: 0 }}          # 0 = never give up
{}",
            self.authority,
            self.edge,
            upstreams(&self.backends)
        )
    }

    fn node_env(&self) -> String {
        format!(
            "# The same as node.yaml, for `EnvironmentFile=` of systemd or `--env-file` of a container. Paths start at the working
# directory.
IOP_NODE_CONFIG=node.yaml
IOP_NODE_EDGE=https://{}
",
            self.authority
        )
    }
}

/// What a Node must allow for its backends, if the default does not.
fn upstreams(backends: &[&str]) -> String {
    let mut hosts = Vec::new();
    for url in backends.iter().filter(|url| AllowUpstream::default().check(url).is_err()) {
        let uri = url.parse::<http::Uri>().ok();
        let host = uri.as_ref().and_then(http::Uri::host).map(|host| record::quoted(host.trim_matches(['[', ']'])));
        hosts.extend(host.filter(|host| !hosts.contains(host)));
    }
    if hosts.is_empty() {
        return String::new();
    }
    format!("allow_upstream: [loopback, private, {}]      # what the Edge may let this Node call\n", hosts.join(", "))
}

/// Host and port as they stand in a URL.
pub(crate) fn authority(host: &str, port: u16) -> String {
    if host.contains(':') && !host.starts_with('[') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_allows_each_of_its_backends_once_and_what_is_allowed_anyway_not_at_all() {
        // CRD-6
        let all =
            ["https://api.acme.example/v1", "http://127.0.0.1:8000", "https://api.acme.example", "http://10.0.0.7"];
        assert!(upstreams(&all).starts_with("allow_upstream: [loopback, private, \"api.acme.example\"] "));
        assert_eq!(upstreams(&["http://localhost:8000"]), "");
        assert_eq!(
            (authority("::1", 7).as_str(), authority("edge.example", 7).as_str()),
            ("[::1]:7", "edge.example:7")
        );
    }
}
