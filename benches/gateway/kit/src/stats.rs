//! Exact percentiles.

/// Keeps every sample (ns) and answers exact percentiles, in microseconds.
#[derive(Default)]
pub struct Samples(pub Vec<u64>);

impl Samples {
    pub fn add(&mut self, ns: u64) {
        self.0.push(ns)
    }
    pub fn json(&mut self) -> String {
        if self.0.is_empty() {
            return "null".into();
        }
        self.0.sort_unstable();
        let n = self.0.len();
        let q = |p: f64| self.0[((n as f64 * p) as usize).min(n - 1)] as f64 / 1e3;
        let mean = self.0.iter().map(|&x| x as f64).sum::<f64>() / n as f64 / 1e3;
        format!(
            "{{\"p50\":{:.1},\"p90\":{:.1},\"p99\":{:.1},\"p999\":{:.1},\"max\":{:.1},\"mean\":{:.1},\"n\":{}}}",
            q(0.5), q(0.9), q(0.99), q(0.999), q(1.0), mean, n
        )
    }
}
