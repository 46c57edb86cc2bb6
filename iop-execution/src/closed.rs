//! Decides how closed lists look everywhere: each value has one fixed name, for logs, metric labels and documentation.

/// Declares a closed list: an enum without data whose values have one fixed name each.
///
/// It gets `ALL` (every value, in order), `as_str` and `Display`. The enum is exhaustive: a new value must break whoever
/// matches on it.
#[macro_export]
macro_rules! closed_list {
    ($(#[$doc:meta])* $name:ident { $($(#[$vdoc:meta])* $variant:ident = $text:literal,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[allow(clippy::exhaustive_enums, reason = "a closed list")]
        pub enum $name { $($(#[$vdoc])* $variant,)* }

        impl $name {
            /// Every value.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// Its name in logs, metric labels and documentation.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $text,)* }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.as_str())
            }
        }
    };
}
