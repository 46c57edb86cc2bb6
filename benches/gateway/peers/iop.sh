# IOP, provider bytes tunnelled, TLS between Node and Edge: what a deployment runs.
. "$here/peers/lib/iop.sh"
up() { iop_up tls tunnel; }
