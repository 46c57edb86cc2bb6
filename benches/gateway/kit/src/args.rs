//! Command line arguments.

/// `--key value` arguments; a key may repeat.
pub struct Args(Vec<(String, String)>);

impl Args {
    pub fn parse(it: impl Iterator<Item = String>) -> Self {
        let v: Vec<String> = it.collect();
        let mut out = Vec::new();
        let mut i = 0;
        while i < v.len() {
            let k = v[i]
                .strip_prefix("--")
                .unwrap_or_else(|| panic!("expected --flag, got {}", v[i]))
                .to_string();
            let val = v
                .get(i + 1)
                .unwrap_or_else(|| panic!("--{k} needs a value"))
                .clone();
            out.push((k, val));
            i += 2;
        }
        Args(out)
    }
    pub fn get(&self, k: &str, d: &str) -> String {
        self.0
            .iter()
            .rev()
            .find(|(a, _)| a == k)
            .map(|(_, b)| b.clone())
            .unwrap_or_else(|| d.to_string())
    }
    pub fn num<T: std::str::FromStr>(&self, k: &str, d: T) -> T {
        match self.0.iter().rev().find(|(a, _)| a == k) {
            Some((_, b)) => b
                .parse()
                .unwrap_or_else(|_| panic!("--{k}: bad number {b}")),
            None => d,
        }
    }
    pub fn all(&self, k: &str) -> Vec<String> {
        self.0
            .iter()
            .filter(|(a, _)| a == k)
            .map(|(_, b)| b.clone())
            .collect()
    }
}
