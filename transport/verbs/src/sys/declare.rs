//! Macros that declare structures and constants. Tests can also list the declarations, to compare them with the C headers and with the
//! crate rdma-sys.

/// Declares structures with the layout of C. In tests, `structures` lists them with their fields.
macro_rules! structures {
    ($($(#[$meta:meta])* pub struct $name:ident { $(pub $field:ident: $type:ty,)* })*) => {
        $(
            $(#[$meta])*
            #[repr(C)]
            #[derive(Clone, Copy)]
            pub struct $name { $(pub $field: $type,)* }
        )*

        /// Returns every structure that is declared above, with the offset of each field.
        #[cfg(all(test, feature = "rdma-sys"))]
        pub fn structures() -> Vec<super::declare::Structure> {
            use super::declare::{Field, Structure, field_size};
            vec![$(Structure {
                name: stringify!($name),
                size: size_of::<$name>(),
                align: align_of::<$name>(),
                fields: vec![$(Field {
                    name: stringify!($field),
                    offset: std::mem::offset_of!($name, $field),
                    size: field_size(|of: &$name| &raw const of.$field),
                },)*],
            },)*]
        }

        /// Returns the structures of the crate rdma-sys that have the same names.
        #[cfg(all(test, feature = "rdma-sys"))]
        pub fn structures_of_rdma_sys() -> Vec<super::declare::Structure> {
            use super::declare::{Field, Structure, field_size};
            vec![$(Structure {
                name: stringify!($name),
                size: size_of::<rdma_sys::$name>(),
                align: align_of::<rdma_sys::$name>(),
                fields: vec![$(Field {
                    name: stringify!($field),
                    offset: std::mem::offset_of!(rdma_sys::$name, $field),
                    size: field_size(|of: &rdma_sys::$name| &raw const of.$field),
                },)*],
            },)*]
        }
    };
}

/// Declares the constants of C enumerations. `mod` declares plain numbers. `flags` declares a type whose values can be
/// combined.
macro_rules! constants {
    (
        $(mod $module:ident: $of:ty { $($constant:ident = $value:expr,)* })*
        $(flags $flags:ident { $($flag:ident = $bit:expr,)* })*
    ) => {
        $(
            pub mod $module {
                #[allow(unused_imports, reason = "one of the two is the type of this one")]
                use std::ffi::{c_int, c_uint};
                pub type Type = $of;
                $(pub const $constant: Type = $value;)*
            }
        )*
        $(
            #[repr(transparent)]
            #[derive(Clone, Copy, PartialEq, Eq)]
            pub struct $flags(pub std::ffi::c_uint);

            impl $flags {
                $(pub const $flag: Self = Self($bit);)*
            }

            impl std::ops::BitOr for $flags {
                type Output = Self;
                fn bitor(self, other: Self) -> Self {
                    Self(self.0 | other.0)
                }
            }

            impl std::ops::BitOrAssign for $flags {
                fn bitor_assign(&mut self, other: Self) {
                    self.0 |= other.0;
                }
            }
        )*

        /// Returns every constant that is declared above: its name, its value here, and its value in the crate
        /// rdma-sys.
        #[cfg(all(test, feature = "rdma-sys"))]
        pub fn constants() -> Vec<(&'static str, i64, i64)> {
            vec![
                $($((stringify!($constant), i64::from($module::$constant), rdma_sys::$module::$constant as i64),)*)*
                $($((stringify!($flag), i64::from($flags::$flag.0), i64::from(rdma_sys::$flags::$flag.0)),)*)*
            ]
        }
    };
}

pub(super) use constants;
pub(super) use structures;

/// A structure: its name, and the numbers that define its layout.
#[cfg(all(test, feature = "rdma-sys"))]
#[derive(Debug)]
pub struct Structure {
    pub name: &'static str,
    pub size: usize,
    pub align: usize,
    pub fields: Vec<Field>,
}

/// A field of a structure: its name, offset and size.
#[cfg(all(test, feature = "rdma-sys"))]
#[derive(Debug)]
pub struct Field {
    pub name: &'static str,
    pub offset: usize,
    pub size: usize,
}

/// Returns the size of the field to which a function returns a pointer. The function is not called: only its type is
/// used.
#[cfg(all(test, feature = "rdma-sys"))]
pub const fn field_size<S, F>(_: fn(&S) -> *const F) -> usize {
    size_of::<F>()
}
