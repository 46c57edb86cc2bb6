# IOP, normalised run (`wire: run`: answers parsed on the Node, rebuilt on the Edge), TLS between Node and Edge.
. "$here/peers/lib/iop.sh"
# Asked for a whole answer, a run still streams from its upstream, and the mock sends something else then: no plain scenario.
SKIP="S0 S1a S1b S1c S1o S6"
up() { iop_up tls run; }
