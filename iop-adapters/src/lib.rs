//! Provider adapters: how IOP talks to whoever runs models.
//!
//! | feature | adapter kind | what it serves | wire |
//! | --- | --- | --- | --- |
//! | `openai_compat` (default) | `openai_compat` | any server that speaks OpenAI chat completions | tunnel, run |
//! | `llama_cpp` (default) | `llama_cpp` | llama.cpp's server: the same, probed by its slots and counters | tunnel, run |
//! | `lm_studio` (default) | `lm_studio` | LM Studio: the same, probed by what it has loaded | tunnel, run |
//! | `ollama` (default) | `ollama` | Ollama, over its own API | run |
//! | `sglang` (default) | `sglang` | SGLang: the same, probed by its scheduler's counters | tunnel, run |
//! | `vllm` (default) | `vllm` | vLLM: the same, probed by its engine's counters | tunnel, run |
//! | `demo` (default) | `demo` | a deterministic model without weights | run |
//!
//! [`decorators`] wrap any provider: [`decorators::Limit`], [`decorators::Fault`], [`decorators::Record`].
//!
//! What all adapters of HTTP backends share: [`http`] (one request, never retried), [`rules`] (what may pass),
//! [`auth`] (where keys come from), [`observer`] (the event stream parsed once, cut into flagged frames).

#[cfg(feature = "openai_compat")]
pub mod auth;
#[cfg(feature = "openai_compat")]
mod call;
#[cfg(feature = "openai_compat")]
mod chunk;
#[cfg(feature = "openai_compat")]
mod complaint;
pub mod decorators;
#[cfg(feature = "demo")]
pub mod demo;
#[cfg(feature = "openai_compat")]
mod echo;
#[cfg(all(feature = "fuzzing", feature = "ollama"))]
#[doc(hidden)]
pub mod fuzz;
#[cfg(feature = "openai_compat")]
mod heard;
#[cfg(feature = "openai_compat")]
pub mod http;
#[cfg(feature = "openai_compat")]
mod json;
#[cfg(feature = "openai_compat")]
pub mod observer;
#[cfg(feature = "ollama")]
pub mod ollama;
#[cfg(feature = "openai_compat")]
pub mod openai_compat;
#[cfg(feature = "openai_compat")]
pub mod rules;
#[cfg(feature = "openai_compat")]
mod setup;
#[cfg(feature = "openai_compat")]
mod tracker;

#[cfg(feature = "demo")]
pub use demo::{Demo, DemoPace};
#[cfg(feature = "ollama")]
pub use ollama::{Ollama, OllamaConfig};
#[cfg(feature = "openai_compat")]
pub use openai_compat::{OpenAiCompat, OpenAiCompatConfig, Server};
#[cfg(feature = "openai_compat")]
pub use setup::SetupError;

/// The code of the guide is compiled and run with the doc tests.
#[cfg(all(doctest, feature = "openai_compat"))]
#[doc = include_str!("../../docs/adapters.md")]
struct Guide;

/// The adapter kinds of this build.
#[must_use]
pub const fn kinds() -> &'static [&'static str] {
    &[
        #[cfg(feature = "demo")]
        "demo",
        #[cfg(feature = "llama_cpp")]
        "llama_cpp",
        #[cfg(feature = "lm_studio")]
        "lm_studio",
        #[cfg(feature = "ollama")]
        "ollama",
        #[cfg(feature = "openai_compat")]
        "openai_compat",
        #[cfg(feature = "sglang")]
        "sglang",
        #[cfg(feature = "vllm")]
        "vllm",
    ]
}
