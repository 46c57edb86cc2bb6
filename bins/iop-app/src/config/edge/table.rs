//! Decides which keys `edge.yaml` has: the tables that check it and print as its JSON Schema.

use super::credentials::{CREDENTIALS, PROVIDER_CREDENTIAL};
use crate::config::link::LINK;
use crate::config::schema::{Closed, Kind, Object, optional, required};

/// Adapter kinds that config may name, the one it should name first.
pub const KINDS: &[&str] = &["openai_compat", "demo", "vllm", "sglang", "llama_cpp", "lm_studio", "ollama"];

const DAY_MS: u64 = 86_400_000;
const MAX_WAITING: u64 = 1_000_000;
/// How a model's candidates may be ranked.
pub const STRATEGIES: &[&str] = &["least_loaded", "round_robin", "ordered", "prefix_affinity"];
/// Failures that another attempt may follow, as config names them (REC-5).
pub const RETRY_CAUSES: &[&str] = &[
    "busy",
    "draining",
    "disconnected",
    "provider_unreachable",
    "node_suspect",
    "dispatch_unacknowledged",
    "http_429",
    "http_502",
    "http_503",
    "http_504",
];
static RETRY_CAUSE: Closed = Closed {
    words: RETRY_CAUSES,
    never: &[
        ("credential_rejected", "another attempt has the same key"),
        ("invalid_request", "another attempt is the same request"),
        ("response_stalled", "a stall that was seen to end always is one, and needs no name"),
    ],
};
/// Longest time without progress that can be set.
const MAX_STALL_MS: u64 = 3_600_000;
/// Shortest time without progress that is not 0.
pub(super) const MIN_STALL_MS: u64 = 1000;
/// Shortest `probe_timeout_ms` that is not 0.
pub(super) const MIN_PROBE_MS: u64 = 100;
/// Most attempts after the first one.
const MAX_EXTRA_ATTEMPTS: u64 = 10;
/// Shortest time for the receipt of a dispatch.
pub(super) const MIN_DISPATCH_ACK_MS: u64 = 250;
/// Least `suspicion_withdraw_ms` that is not 0.
pub(super) const MIN_SUSPICION_WITHDRAW_MS: u64 = 3000;

static LISTENER: Object = Object {
    name: "a listener",
    fields: &[
        required("address", Kind::Address, "IP address and port"),
        optional(
            "insecure_no_auth",
            Kind::Bool,
            "accept everybody although it is reachable from outside; default false",
        ),
        optional("insecure_plaintext", Kind::Bool, "no TLS although it is reachable from outside; default false"),
    ],
};
static LISTEN: Object = Object {
    name: "listen",
    fields: &[
        optional("openai", Kind::AddressOr(&LISTENER), "where clients connect; default 127.0.0.1:8180"),
        optional("nodes", Kind::AddressOr(&LISTENER), "where Nodes connect; default 127.0.0.1:8443"),
        optional("admin", Kind::AddressOr(&LISTENER), "metrics, health, admin API; default 127.0.0.1:9190"),
    ],
};
static TLS_PAIR: Object = Object {
    name: "a TLS pair",
    fields: &[
        required("cert", Kind::Text, "PEM file with the certificate chain"),
        required("key", Kind::Text, "PEM file with the private key"),
    ],
};
static NODES_TLS: Object = Object {
    name: "a TLS pair of nodes",
    fields: &[
        required("cert", Kind::Text, "PEM file with the certificate chain"),
        required("key", Kind::Text, "PEM file with the private key"),
        optional(
            "client_ca",
            Kind::Text,
            "PEM file with the CAs of the Nodes' certificates: every Node must then show its workload identity; default: none \
             is asked for",
        ),
    ],
};
static TLS: Object = Object {
    name: "tls",
    fields: &[
        optional("openai", Kind::Object(&TLS_PAIR), "for the OpenAI listener"),
        optional("nodes", Kind::Object(&NODES_TLS), "for the listener of Nodes"),
    ],
};
static PREVIOUS: Object = Object {
    name: "a previous secret",
    fields: &[
        required("hash", Kind::Hash, "`sha256:` of the secret before the last rotation"),
        required("expires_at", Kind::Time, "until when it is accepted beside the new one"),
    ],
};
static KEY_LIMITS: Object = Object {
    name: "limits of a key",
    fields: &[
        optional(
            "requests_per_minute",
            Kind::Integer { min: 1, max: u32::MAX as u64 },
            "requests in any 60 seconds; default none",
        ),
        optional(
            "tokens_per_minute",
            Kind::Integer { min: 1, max: 1 << 50 },
            "input and output tokens in any 60 seconds, as providers report them; default none",
        ),
        optional(
            "concurrent",
            Kind::Integer { min: 1, max: u32::MAX as u64 },
            "requests at once, waiting ones among them; default none",
        ),
    ],
};
static API_KEY: Object = Object {
    name: "an API key",
    fields: &[
        required("id", Kind::TokenId, "the 8 characters after `iopk_`"),
        required("hash", Kind::Hash, "`sha256:` of the key's secret part, from `iop-edge hash`"),
        optional("principal", Kind::Text, "who uses it; default: the id"),
        optional("models", Kind::List(&Kind::Text), "models it may use; default [\"*\"] = all"),
        optional(
            "priority",
            Kind::Signed { min: -100, max: 100 },
            "who waits for a place with a higher one goes first; default 0",
        ),
        optional(
            "max_priority",
            Kind::Signed { min: -100, max: 100 },
            "the highest that a request may ask for by `x-iop-priority`; default: priority",
        ),
        optional("limits", Kind::Object(&KEY_LIMITS), "how much it may use; default: no limit"),
        optional("expires_at", Kind::Time, "from when it is refused; default: never"),
        optional("previous", Kind::Object(&PREVIOUS), "its secret before the last rotation"),
    ],
};
static NODE_TOKEN: Object = Object {
    name: "a node token",
    fields: &[
        required("node", Kind::Text, "id of the Node, as in edge.yaml"),
        required("token_id", Kind::TokenId, "the 8 characters after `iopn_`"),
        required("token_hash", Kind::Hash, "`sha256:` of the token's secret part"),
        optional("expires_at", Kind::Time, "from when it is refused; default: never"),
        optional("previous", Kind::Object(&PREVIOUS), "its secret before the last rotation"),
    ],
};
/// The table of `auth.api_keys_file`.
pub(super) static API_KEYS_FILE: Object = Object {
    name: "a file of API keys",
    fields: &[required("api_keys", Kind::List(&Kind::Object(&API_KEY)), "keys of clients")],
};
/// The table of `auth.node_tokens_file`.
pub(super) static NODE_TOKENS_FILE: Object = Object {
    name: "a file of node tokens",
    fields: &[required("node_tokens", Kind::List(&Kind::Object(&NODE_TOKEN)), "tokens of Nodes")],
};
static ADMIN: Object = Object {
    name: "admin",
    fields: &[required(
        "key_hash",
        Kind::Hash,
        "`sha256:` of the admin key's secret part, from `iop-edge hash`; without one the admin API is closed",
    )],
};
static HEALTH: Object = Object {
    name: "health",
    fields: &[
        optional(
            "suspicion_withdraw_ms",
            Kind::Integer { min: 0, max: DAY_MS },
            "how long a suspect Node may stay silent before its unanswered requests go elsewhere; at least 3000, 0 = for \
             ever; default 10000",
        ),
        optional(
            "dispatch_ack_timeout_ms",
            Kind::Integer { min: MIN_DISPATCH_ACK_MS, max: 600_000 },
            "time a Node may take to confirm that it has a request, before it is asked; default 2000",
        ),
    ],
};
static RECOVERY: Object = Object {
    name: "recovery",
    fields: &[
        optional(
            "max_extra_attempts",
            Kind::Integer { min: 0, max: MAX_EXTRA_ATTEMPTS },
            "attempts after the first one of a request that has no content yet, for all causes together; 0 = none; default 2",
        ),
        optional("retry_on", Kind::List(&Kind::Closed(&RETRY_CAUSE)), RETRY_ON),
        optional(
            "keepalive_after_ms",
            Kind::Integer { min: 0, max: DAY_MS },
            "a streaming client that has waited this long without content gets 200 and comments; 0 = never; default 20000",
        ),
    ],
};
const RETRY_ON: &str = "failures before content that another attempt may follow; [] = stalls that were seen to end, and nothing \
                        else; default [busy, draining, disconnected, provider_unreachable, node_suspect, dispatch_unacknowledged]";
static AUTH: Object = Object {
    name: "auth",
    fields: &[
        optional("api_keys", Kind::List(&Kind::Object(&API_KEY)), "keys of clients; none = open, on loopback only"),
        optional("api_keys_file", Kind::Text, "YAML file with more keys, which `iop key` writes"),
        optional("node_tokens_file", Kind::Text, "YAML file with tokens of Nodes, which `iop token` writes"),
    ],
};
static PROVIDER_AUTH: Object = Object {
    name: "auth of a provider",
    fields: &[required("bearer", Kind::Reference, "where the Node finds the key: `env:NAME` or `file:PATH`")],
};
static PROVIDER: Object = Object {
    name: "a provider",
    fields: &[
        required("id", Kind::Text, "unique among all Nodes"),
        optional("adapter", Kind::Text, "name of the adapter instance on the Node; default: the id"),
        required("kind", Kind::Choice(KINDS), "code that talks to the backend"),
        optional("base_url", Kind::Text, "where the backend is: http://host:port, with or without /v1"),
        optional(
            "wire",
            Kind::Choice(&["auto", "run"]),
            "auto: tunnels where possible; run: normalised runs only; default auto",
        ),
        optional(
            "capacity",
            Kind::Integer { min: 1, max: 65_536 },
            "requests at once; default: what the backend says, else 16",
        ),
        optional("long_capacity", Kind::Integer { min: 0, max: 65_536 }, "of which for long requests; default all"),
        optional("targets", Kind::List(&Kind::Text), "models it may serve; default: what it lists"),
        optional(
            "response_stall_timeout_ms",
            Kind::Integer { min: 0, max: MAX_STALL_MS },
            "longest time without progress; 1000 to 3600000; 0 = default 300000",
        ),
        optional(
            "first_response_timeout_ms",
            Kind::Integer { min: 0, max: MAX_STALL_MS },
            "a longer time up to the first progress only; 1000 to 3600000; 0 = default: response_stall_timeout_ms",
        ),
        optional(
            "first_response_per_1k_prompt_ms",
            Kind::Integer { min: 0, max: MAX_STALL_MS },
            "added to the time up to the first progress for each 1000 estimated tokens of the prompt; default 0",
        ),
        optional(
            "probe_timeout_ms",
            Kind::Integer { min: 0, max: 60_000 },
            "for the question after a stall whether the backend lives; 100 to 60000; 0 = default 5000",
        ),
        optional(
            "close_grace_ms",
            Kind::Integer { min: 0, max: 60_000 },
            "for a cancelled call to return; 0 = default 5000",
        ),
        optional(
            "terminal_linger_ms",
            Kind::Integer { min: 0, max: 60_000 },
            "wait for usage after the end; 0 = default 2000",
        ),
        optional(
            "cancel_policy",
            Kind::Choice(&["abort", "drain"]),
            "a cancelled call: abort closes its connection, drain reads it to its end first; default abort",
        ),
        optional("auth", Kind::Object(&PROVIDER_AUTH), "the provider's key, which the Node has"),
        optional(
            "credential",
            Kind::Object(&PROVIDER_CREDENTIAL),
            "the provider's key, which the Edge has: each call gets a lease of it; never together with `auth`",
        ),
        optional("enabled", Kind::Bool, "default true"),
    ],
};
static NODE: Object = Object {
    name: "a node",
    fields: &[
        required("id", Kind::Text, "unique"),
        optional("token_id", Kind::TokenId, "the 8 characters after `iopn_`; the record is found faster with it"),
        optional(
            "token_hash",
            Kind::Hash,
            "`sha256:` of the token's secret part, from `iop-edge hash`; needed unless auth.node_tokens_file has it",
        ),
        optional("token_expires_at", Kind::Time, "from when the token is refused; default: never"),
        optional("previous_token", Kind::Object(&PREVIOUS), "the token's secret before the last rotation"),
        optional(
            "identities",
            Kind::List(&Kind::Text),
            "workload identities that are this Node, where tls.nodes.client_ca asks for one; default \
             [\"spiffe://<trust_domain>/iop/node/<id>\"]",
        ),
        optional("providers", Kind::List(&Kind::Object(&PROVIDER)), "what it runs"),
        optional("enabled", Kind::Bool, "false: known, and may not connect; default true"),
    ],
};
static CANDIDATE: Object = Object {
    name: "a candidate",
    fields: &[
        required("provider", Kind::Text, "id of a provider"),
        optional("target", Kind::Text, "the model as the provider knows it; default: the public name"),
        optional("weight", Kind::Integer { min: 1, max: 1000 }, "share of the load; default 1"),
    ],
};
static MODEL: Object = Object {
    name: "a model",
    fields: &[
        required("name", Kind::Text, "public name"),
        optional("aliases", Kind::List(&Kind::Text), "more public names"),
        required("candidates", Kind::List(&Kind::Object(&CANDIDATE)), "providers that can serve it"),
        optional(
            "long_context_threshold",
            Kind::Integer { min: 1, max: 1 << 30 },
            "estimated prompt tokens from which a request is long; default: none is",
        ),
        optional("strategy", Kind::Choice(STRATEGIES), "how a free candidate is chosen; default: queue.strategy"),
        optional(
            "absence_grace_ms",
            Kind::Integer { min: 0, max: DAY_MS },
            "how long requests wait when no candidate is connected; default 0 = they are refused at once",
        ),
        optional(
            "max_waiting",
            Kind::Integer { min: 0, max: MAX_WAITING },
            "requests that may wait for this model; default: queue.max_waiting",
        ),
        optional(
            "queue_timeout_ms",
            Kind::Integer { min: 1, max: DAY_MS },
            "longest wait for a place; default: queue.timeout_ms",
        ),
        optional(
            "retry_on",
            Kind::List(&Kind::Closed(&RETRY_CAUSE)),
            "failures before content that another attempt may follow; default: recovery.retry_on",
        ),
    ],
};
static QUEUE: Object = Object {
    name: "queue",
    fields: &[
        optional(
            "max_waiting",
            Kind::Integer { min: 0, max: MAX_WAITING },
            "waiting requests per model group; default 1024",
        ),
        optional("timeout_ms", Kind::Integer { min: 1, max: DAY_MS }, "longest wait for a place; default 30000"),
        optional(
            "strategy",
            Kind::Choice(STRATEGIES),
            "how a free candidate is chosen, for models that say nothing; default least_loaded",
        ),
    ],
};
static CORS: Object = Object {
    name: "cors",
    fields: &[optional(
        "allowed_origins",
        Kind::List(&Kind::Text),
        "origins whose web pages may read answers, like https://app.example; `*` = all; default: none",
    )],
};
static LIMITS: Object = Object {
    name: "limits",
    fields: &[
        optional(
            "request_body_bytes",
            Kind::Integer { min: 1024, max: 1 << 30 },
            "largest request body; default 33554432",
        ),
        optional("connections", Kind::Integer { min: 1, max: 1_000_000 }, "client connections in total; default 4096"),
        optional(
            "connections_per_address",
            Kind::Integer { min: 1, max: 1_000_000 },
            "client connections per address; default 256",
        ),
    ],
};
static OBSERVABILITY: Object = Object {
    name: "observability",
    fields: &[
        optional("log", Kind::Choice(&["pretty", "json"]), "form of log lines; default pretty"),
        optional("filter", Kind::Text, "log filter, like `info,iop_node=debug`; default info"),
    ],
};

/// The table of `edge.yaml`.
pub static EDGE: Object = Object {
    name: "the config",
    fields: &[
        optional("edge_id", Kind::Text, "name of this Edge, for people; default edge"),
        optional("listen", Kind::Object(&LISTEN), "addresses"),
        optional("tls", Kind::Object(&TLS), "certificates; each may be left out on loopback only"),
        optional("trust_domain", Kind::Text, "trust domain of workload identities; default iop.local"),
        optional("auth", Kind::Object(&AUTH), "who may use it"),
        optional("admin", Kind::Object(&ADMIN), "who may operate it"),
        optional(
            "credentials",
            Kind::Object(&CREDENTIALS),
            "keys of providers that the Edge lends to Nodes, one call at a time",
        ),
        optional("nodes", Kind::List(&Kind::Object(&NODE)), "Nodes and what they run"),
        optional(
            "models",
            Kind::AutoOr(&Kind::List(&Kind::AutoOr(&Kind::Object(&MODEL)))),
            "auto: publish what providers list; or a list of model groups, with `auto` among them for both; default auto",
        ),
        optional("queue", Kind::Object(&QUEUE), "waiting requests"),
        optional("health", Kind::Object(&HEALTH), "when Nodes count as failing"),
        optional("recovery", Kind::Object(&RECOVERY), "further attempts of requests that failed before content"),
        optional(
            "request_deadline_ms",
            Kind::Integer { min: 0, max: DAY_MS },
            "hard limit for a whole request; 0 = none; default 0",
        ),
        optional(
            "response_model",
            Kind::Choice(&["requested", "target"]),
            "name of the model in answers; default requested",
        ),
        optional("cors", Kind::Object(&CORS), "web pages of other origins"),
        optional("list_unavailable", Kind::Bool, "/v1/models also lists what no provider can serve now; default false"),
        optional("limits", Kind::Object(&LIMITS), "limits of the OpenAI listener"),
        optional("link", Kind::Object(&LINK), "connections of Nodes"),
        optional("observability", Kind::Object(&OBSERVABILITY), "logs"),
    ],
};
