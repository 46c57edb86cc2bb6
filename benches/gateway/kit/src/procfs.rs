//! CPU time and memory of processes, as /proc shows them; the limit of open files.

use std::collections::HashMap;

/// A set of root pids plus all their descendants.
pub struct Watch {
    roots: Vec<u32>,
}

#[derive(Clone, Copy, Default)]
pub struct Usage {
    pub cpu_s: f64,
    pub rss_kb: u64,
}

fn stat(pid: u32) -> Option<(u32, u64)> {
    let s = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let rest = &s[s.rfind(')')? + 2..];
    let f: Vec<&str> = rest.split(' ').collect();
    let ppid = f.get(1)?.parse().ok()?;
    let ticks = f.get(11)?.parse::<u64>().ok()? + f.get(12)?.parse::<u64>().ok()?;
    Some((ppid, ticks))
}

impl Watch {
    pub fn new(list: &str) -> Self {
        Watch {
            roots: list
                .split([',', ' '])
                .filter_map(|p| p.trim().parse().ok())
                .collect(),
        }
    }
    pub fn is_empty(&self) -> bool {
        self.roots.is_empty()
    }
    pub fn usage(&self) -> Usage {
        if self.roots.is_empty() {
            return Usage::default();
        }
        let mut all: HashMap<u32, (u32, u64)> = HashMap::new();
        if let Ok(rd) = std::fs::read_dir("/proc") {
            for e in rd.flatten() {
                if let Some(pid) = e.file_name().to_str().and_then(|s| s.parse().ok()) {
                    if let Some(s) = stat(pid) {
                        all.insert(pid, s);
                    }
                }
            }
        }
        let mut mine: Vec<u32> = self
            .roots
            .iter()
            .copied()
            .filter(|p| all.contains_key(p))
            .collect();
        let mut i = 0;
        while i < mine.len() {
            for (&p, &(pp, _)) in &all {
                if pp == mine[i] && !mine.contains(&p) {
                    mine.push(p);
                }
            }
            i += 1;
        }
        // SAFETY: plain sysconf reads.
        let (hz, page) = unsafe {
            (
                libc::sysconf(libc::_SC_CLK_TCK) as f64,
                libc::sysconf(libc::_SC_PAGESIZE) as u64,
            )
        };
        let mut u = Usage::default();
        for p in mine {
            u.cpu_s += all[&p].1 as f64 / hz;
            if let Ok(s) = std::fs::read_to_string(format!("/proc/{p}/statm")) {
                u.rss_kb += s
                    .split(' ')
                    .nth(1)
                    .and_then(|x| x.parse::<u64>().ok())
                    .unwrap_or(0)
                    * page
                    / 1024;
            }
        }
        u
    }
}

pub fn self_cpu() -> f64 {
    // SAFETY: `r` is a valid, writable rusage.
    let r = unsafe {
        let mut r: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_SELF, &mut r);
        r
    };
    (r.ru_utime.tv_sec + r.ru_stime.tv_sec) as f64
        + (r.ru_utime.tv_usec + r.ru_stime.tv_usec) as f64 / 1e6
}

pub fn raise_nofile() {
    // SAFETY: `l` is a valid, writable rlimit.
    unsafe {
        let mut l = libc::rlimit {
            rlim_cur: 0,
            rlim_max: 0,
        };
        libc::getrlimit(libc::RLIMIT_NOFILE, &mut l);
        l.rlim_cur = l.rlim_max;
        libc::setrlimit(libc::RLIMIT_NOFILE, &l);
    }
}
