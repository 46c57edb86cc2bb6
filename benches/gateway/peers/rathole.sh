# rathole 0.5, TCP transport, no TLS: client dials out, two hops. No HTTP understanding at all.
# cargo install rathole --no-default-features --features server,client
up() {
  local d=$TMP/rathole; mkdir -p "$d"
  cat > "$d/s.toml" <<C
[server]
bind_addr = "127.0.0.1:$((PORT + 1))"
default_token = "bench"
[server.transport]
type = "tcp"
[server.transport.tcp]
nodelay = true
[server.services.llm]
bind_addr = "127.0.0.1:$PORT"
nodelay = true
C
  cat > "$d/c.toml" <<C
[client]
remote_addr = "127.0.0.1:$((PORT + 1))"
default_token = "bench"
[client.transport]
type = "tcp"
[client.transport.tcp]
nodelay = true
[client.services.llm]
local_addr = "$UPSTREAM"
nodelay = true
C
  RUST_LOG=error spawn "${RATHOLE:-rathole}" --server "$d/s.toml"
  sleep 0.3
  RUST_LOG=error spawn "${RATHOLE:-rathole}" --client "$d/c.toml"
  URL=http://127.0.0.1:$PORT/v1
}
