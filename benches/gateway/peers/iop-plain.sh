# IOP, provider bytes tunnelled, no TLS on the link: comparable with rathole and the floors, which have none.
. "$here/peers/lib/iop.sh"
up() { iop_up plain tunnel; }
