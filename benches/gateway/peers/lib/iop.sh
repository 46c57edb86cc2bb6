# IOP as one Edge and one Node; peers/iop*.sh choose the link and the wire.
# shellcheck shell=bash disable=SC2034,SC2154 # run.sh's variables
# Needs run.sh's PORT, UPSTREAM, TMP and spawn, and OpenSSL 3. IOP_BIN: folder of iop-edge and iop-node.
# Listeners: OpenAI on PORT, nodes on PORT + 1, admin on PORT + 2. S4 opens 1,000 connections from one address: the
# Edge's limit per address has to allow that.

# A secret as in a token: 32 random bytes in base64url, 43 characters.
iop_secret() { openssl rand -base64 32 | tr '+/' '-_' | tr -d '='; }

# What the config stores of a secret.
iop_hash() { printf 'sha256:%s' "$(printf %s "$1" | openssl dgst -sha256 -r | cut -d' ' -f1)"; }

# A CA, and a certificate of it for 127.0.0.1, in folder $1.
iop_certs() {
  openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj "/CN=bench CA" \
    -addext "basicConstraints=critical,CA:TRUE" -addext "keyUsage=critical,keyCertSign,cRLSign" \
    -keyout "$1/ca-key.pem" -out "$1/ca.pem" &&
  openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj "/CN=bench edge" \
    -CA "$1/ca.pem" -CAkey "$1/ca-key.pem" \
    -addext "basicConstraints=critical,CA:FALSE" -addext "keyUsage=critical,digitalSignature" \
    -addext "extendedKeyUsage=serverAuth" -addext "subjectAltName=IP:127.0.0.1,DNS:localhost" \
    -keyout "$1/edge-key.pem" -out "$1/edge.pem"
}

# iop_up tls|plain tunnel|run
iop_up() {
  local link=$1 wire=$2 d=$TMP/iop bin=${IOP_BIN:-$here/../../target/release} scheme=http tls='' wire_key='' ca=() node_secret key_secret
  if ! [ -x "$bin/iop-edge" ] || ! [ -x "$bin/iop-node" ]; then
    echo "no iop-edge and iop-node in $bin: cargo build --release, or set IOP_BIN" >&2
    return 1
  fi
  bin=$(cd "$bin" && pwd)
  rm -rf "$d"; mkdir -m 700 "$d"
  node_secret=$(iop_secret) key_secret=$(iop_secret)
  (umask 077; printf 'iopn_benchnod_%s\n' "$node_secret" > "$d/node.token")
  if [ "$link" = tls ]; then
    iop_certs "$d" 2>"$d/openssl.log" || { cat "$d/openssl.log" >&2; return 1; }
    scheme=https ca=(--ca "$d/ca.pem")
    tls="tls: { nodes: { cert: \"$d/edge.pem\", key: \"$d/edge-key.pem\" } }"
  fi
  [ "$wire" = tunnel ] || wire_key=", wire: $wire"
  cat > "$d/edge.yaml" <<C
listen: { openai: "127.0.0.1:$PORT", nodes: "127.0.0.1:$((PORT + 1))", admin: "127.0.0.1:$((PORT + 2))" }
$tls
auth:
  api_keys:
    - { id: benchkey, hash: "$(iop_hash "$key_secret")", principal: bench, models: ["*"] }
nodes:
  - id: bench
    token_id: benchnod
    token_hash: "$(iop_hash "$node_secret")"
    providers:
      - { id: bench, kind: openai_compat, base_url: "http://$UPSTREAM", capacity: 4096$wire_key }
models:
  - name: bench
    candidates: [ { provider: bench, target: bench } ]
queue: { max_waiting: 8192, timeout_ms: 30000 }
limits: { connections: 8192, connections_per_address: 8192 }
C
  IOP_LOG=error spawn "$bin/iop-edge" serve --config "$d/edge.yaml"
  # In its own folder, because the run journal stands in the working directory.
  IOP_LOG=error spawn env -C "$d" "$bin/iop-node" serve --edge "$scheme://127.0.0.1:$((PORT + 1))" --token-file "$d/node.token" "${ca[@]}"
  URL=http://127.0.0.1:$PORT/v1
  MODEL=bench KEY=iopk_benchkey_$key_secret
}
