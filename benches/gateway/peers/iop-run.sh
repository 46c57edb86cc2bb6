# IOP, normalised run (`wire: run`: answers parsed on the Node, rebuilt on the Edge), TLS between Node and Edge.
. "$here/peers/lib/iop.sh"
up() { iop_up tls run; }
