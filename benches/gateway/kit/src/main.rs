//! bench upstream --listen 127.0.0.1:9100
//! bench load --url http://127.0.0.1:9100/v1 --mode stream --conc 64 --n 200 --tps 50 --reqs 2
mod args;
mod clock;
mod crowd;
mod http1;
mod load;
mod procfs;
mod stats;
mod upstream;

fn main() {
    let mut it = std::env::args().skip(1);
    let cmd = it.next().unwrap_or_default();
    let a = args::Args::parse(it);
    match cmd.as_str() {
        "upstream" => upstream::main(a),
        "crowd" => crowd::main(a),
        "load" => load::main(a),
        _ => {
            eprintln!("usage: bench upstream|load|crowd [--flag value]...");
            std::process::exit(2)
        }
    }
}
