//! Decides every bound of the wire, each named once.

use std::time::Duration;

/// Lowest protocol version this build speaks.
pub const PROTO_MIN: u32 = 1;
/// Highest protocol version this build speaks.
pub const PROTO_MAX: u32 = 1;
/// Largest encoded envelope, both directions (WIR-8).
pub const MAX_ENVELOPE: usize = 64 * 1024;
/// Largest encoded registration or config envelope, Edge to Node (WIR-8).
pub const MAX_CONFIG_ENVELOPE: usize = 1024 * 1024;
/// Largest encoded envelope of a Node that has not registered yet (REG-8).
pub const MAX_PRE_REGISTER_ENVELOPE: usize = 16 * 1024;
/// Messages of a Node until it has registered: Hello and Register (REG-1).
pub const PRE_REGISTER_MESSAGES: u32 = 2;
/// Largest piece of a body (WIR-8).
pub const MAX_CHUNK: usize = 16 * 1024;
/// Largest text of one delta.
pub const MAX_DELTA: usize = 4 * 1024;
/// Initial credit of a run and direction (WIR-7).
pub const INITIAL_WINDOW: u32 = 128 * 1024;
/// Smallest initial credit.
pub const MIN_WINDOW: u32 = 16 * 1024;
/// Largest outstanding credit.
pub const MAX_WINDOW: u32 = 1024 * 1024;
/// Least charge of a frame (WIR-7).
pub const MIN_CHARGE: u32 = 256;
/// Largest terminal, failure or usage frame: exempt from credit, so bounded (WIR-7).
pub const MAX_EXEMPT: usize = 16 * 1024;
/// Most control messages that wait.
pub const CONTROL_QUEUE: usize = 256;
/// Control messages before one data frame passes.
pub const CONTROL_BURST: usize = 16;
/// Bytes a run may send per turn of the deficit round robin.
pub const DRR_QUANTUM: u32 = 4 * 1024;
/// Most frames that wait in one run's queue before its producer is held back.
pub const RUN_QUEUE_FRAMES: usize = 64;
/// Most charged bytes that wait in one run's queue before its producer is held back.
pub const RUN_QUEUE_BYTES: usize = INITIAL_WINDOW as usize;
/// Most control-like messages of one run that wait (credits of one run join, a cancel is queued once).
pub const RUN_CONTROL: usize = 8;
/// HTTP/2 window of a connection (WIR-10).
pub const H2_CONNECTION_WINDOW: u32 = 2 * 1024 * 1024;
/// HTTP/2 window of a stream (WIR-10).
pub const H2_STREAM_WINDOW: u32 = 1024 * 1024;
/// The Edge's receive pool (WIR-7).
pub const RECEIVE_POOL: u64 = 256 * 1024 * 1024;
/// Time for Hello and Register (REG-1).
pub const REGISTER_TIMEOUT: Duration = Duration::from_secs(10);
/// Time from acceptance to Ready (REG-1).
pub const READY_TIMEOUT: Duration = Duration::from_secs(60);
/// Time a Node's present connection has to answer when another one wants its place (REG-5).
pub const CHALLENGE_TIMEOUT: Duration = Duration::from_secs(5);
/// Time the receipt of a dispatch may take, by default (WIR-14).
pub const DISPATCH_ACK_TIMEOUT: Duration = Duration::from_secs(2);
/// The least it may be set to.
pub const MIN_DISPATCH_ACK_TIMEOUT: Duration = Duration::from_millis(250);
/// Time between pings (WIR-12).
pub const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(30);
/// Time a ping may go without a pong (WIR-12).
pub const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(45);
/// How much later than asked a heartbeat timer may run before its process counts as suspended (WIR-12).
pub const HEARTBEAT_SLACK: Duration = Duration::from_secs(5);
/// Most pings without a pong that are remembered.
pub const HEARTBEAT_OUTSTANDING: usize = 8;
/// Time for the TLS handshake of an accepted connection (REG-8), and for the first HTTP/2 request on it.
pub const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Time for TCP and TLS of a dial.
pub const DIAL_TIMEOUT: Duration = Duration::from_secs(10);
/// Connections that may be in their handshake at once; more wait in the system's accept queue (REG-8).
pub const ACCEPT_QUEUE: usize = 128;
/// Connections of one address that may be in handshake (REG-8). Of IPv6, the first 64 bits are one address.
pub const HANDSHAKES_PER_ADDRESS: usize = ACCEPT_QUEUE / 2;
/// Sessions that one HTTP/2 connection may carry: more than one only behind a proxy that joins connections.
pub const SESSIONS_PER_CONNECTION: u32 = 64;
/// Time a closed link's connection may take to flush before it is dropped.
pub const CLOSE_LINGER: Duration = Duration::from_secs(1);
/// Bytes that HTTP/2 may hold back per stream, between the outbox and the socket (WIR-9).
pub const H2_SEND_BUFFER: usize = 64 * 1024;
/// Most headers of a tunnel request or head.
pub const MAX_HEADERS: usize = 64;
/// Most bytes of the headers of a tunnel request or head, names and values.
pub const MAX_HEADER_BYTES: usize = 16 * 1024;
/// Most feature strings, inventory entries, or providers in one message.
pub const MAX_LIST: usize = 256;
/// Most targets of one provider in one message.
pub const MAX_TARGETS: usize = 4096;
/// Longest text that is a name or a version.
pub const MAX_TEXT: usize = 256;
/// Longest node token.
pub const MAX_TOKEN: usize = 1024;
/// Longest path and query, base URL, or credential reference.
pub const MAX_PATH: usize = 8 * 1024;
/// Largest sealed credential lease.
pub const MAX_LEASE: usize = 16 * 1024;
/// Most trusted issuers of credential leases (CRD-8).
pub const MAX_LEASE_SIGNERS: usize = 8;
/// Most credential slots in one message.
pub const MAX_CREDENTIAL_STATES: usize = 4096;
/// Largest body of a command, and of its answer.
pub const MAX_COMMAND_BODY: usize = 32 * 1024;
/// Feature: a Node may send a ConfigAck nobody waits for, when what its providers offer has changed (ADP-5).
pub const FEATURE_PROVIDER_OFFERS: &str = "provider_offers";
/// Features this build offers.
pub const FEATURES: &[&str] = &[FEATURE_PROVIDER_OFFERS];
/// Places of a provider when neither config nor backend says how many (LEA-8).
pub const DEFAULT_CAPACITY: u32 = 16;
