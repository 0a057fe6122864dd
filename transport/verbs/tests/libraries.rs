//! The libraries of RDMA are loaded at run time. These tests check which error `Verbs::open` returns if the libraries are missing, are too
//! old, or find no device. Each test builds its own libraries, and another process loads them in place of the system's. No device is
//! needed.
#![cfg(not(feature = "rdma-sys"))]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use rdma_transport::TransportError;
use rdma_transport_verbs::Verbs;

/// Returns the names of the functions that the library must have, from the declarations in the source code.
fn required(library: &str) -> Vec<&'static str> {
    let source = include_str!("../src/sys/calls.rs");
    let (_, list) = source.split_once("    required {\n").expect("the list of functions");
    let (list, _) = list.split_once("    optional {\n").expect("the end of the list");
    let prefix = format!("{library} fn ");
    list.lines().filter_map(|line| line.trim().strip_prefix(&prefix)?.split('(').next()).collect()
}

/// A folder with libraries that a test has built. It is removed on drop.
struct Libraries(PathBuf);

impl Libraries {
    fn new(name: &str) -> Self {
        let path = env::temp_dir().join(format!("rdma-libraries-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn compile(&self, file: &str, source: &str) -> &Self {
        let c = self.0.join("library.c");
        fs::write(&c, source).unwrap();
        let done = Command::new("cc").args(["-shared", "-fPIC", "-w", "-o"]).arg(self.0.join(file)).arg(&c).status();
        assert!(done.unwrap().success());
        self
    }

    /// Builds both libraries without the function `missing`. `list` is the C code of the function that returns the list
    /// of devices.
    fn all_but(&self, missing: &str, list: &str) -> &Self {
        for (library, file) in [("verbs", "libibverbs.so.1"), ("cm", "librdmacm.so.1")] {
            let names = required(library);
            assert!(names.len() > 20, "{names:?}");
            let mut source = String::from("#include <errno.h>\n#include <stdlib.h>\n");
            for name in names.into_iter().filter(|&name| name != missing) {
                source += &match name {
                    "ibv_get_device_list" => format!("void *{name}(int *count) {{ {list} }}\n"),
                    _ => format!("void {name}(void) {{}}\n"),
                };
            }
            self.compile(file, &source);
        }
        self
    }

    /// Runs `test` of this program in another process with these libraries. Returns the text that the process prints
    /// about opening the provider.
    fn open(&self, test: &str, variables: &[(&str, &str)]) -> String {
        let output = Command::new(env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture", "--test-threads=1"])
            .env("LD_LIBRARY_PATH", &self.0)
            .env("RDMA_LIBRARIES_CHILD", "1")
            .env_remove("RDMAV_DRIVERS")
            .env_remove("IBV_DRIVERS")
            .envs(variables.iter().copied())
            .output()
            .unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
        let line = text.lines().find_map(|line| line.split_once("opened: "));
        line.unwrap_or_else(|| panic!("{text}")).1.to_owned()
    }
}

impl Drop for Libraries {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).unwrap();
    }
}

/// In a process that [`Libraries::open`] has started, opens the provider, prints the result and returns true. Returns
/// false in the process that runs all tests.
fn opened() -> bool {
    if env::var_os("RDMA_LIBRARIES_CHILD").is_none() {
        return false;
    }
    let mapped = |what: &str| fs::read_to_string("/proc/self/maps").unwrap().contains(what);
    assert!(!mapped("libibverbs") && !mapped("librdmacm"), "the program is linked with a library");
    match Verbs::open() {
        Ok(_) => println!("\nopened: yes"),
        Err(error @ TransportError::NoLibrary { .. }) => println!("\nopened: NoLibrary {error}"),
        Err(error @ TransportError::NoDevice { .. }) => println!("\nopened: NoDevice {error}"),
        Err(error) => println!("\nopened: {error:?}"),
    }
    // A second attempt fails in the same way, because the first result is kept.
    assert!(matches!(Verbs::open(), Err(TransportError::NoLibrary { .. } | TransportError::NoDevice { .. })));
    true
}

fn says(said: &str, parts: &[&str]) {
    for part in parts {
        assert!(said.contains(part), "{part:?} is not in {said:?}");
    }
}

#[test]
fn a_missing_library_is_named_with_the_package() {
    if opened() {
        return;
    }
    // The system's library is hidden by a file with the same name that is not a library.
    let hidden = Libraries::new("hidden");
    fs::write(hidden.0.join("libibverbs.so.1"), "").unwrap();
    let said = hidden.open("a_missing_library_is_named_with_the_package", &[]);
    says(&said, &["NoLibrary", "no RDMA library: libibverbs.so.1 cannot be loaded", "install rdma-core"]);
    // If only the second library is missing, the error names the second library.
    let half = Libraries::new("half");
    half.all_but("", "return 0;");
    fs::write(half.0.join("librdmacm.so.1"), "").unwrap();
    let said = half.open("a_missing_library_is_named_with_the_package", &[]);
    says(&said, &["NoLibrary", "librdmacm.so.1 cannot be loaded"]);
}

#[test]
fn every_function_that_an_old_library_lacks_is_named() {
    if opened() {
        return;
    }
    let functions = [("libibverbs.so.1", "ibv_init_ah_from_wc"), ("librdmacm.so.1", "rdma_migrate_id")];
    for (library, function) in functions {
        let old = Libraries::new(function);
        old.all_but(function, "return 0;");
        let said = old.open("every_function_that_an_old_library_lacks_is_named", &[]);
        says(&said, &["NoLibrary", library, function, "install rdma-core 20 or newer"]);
    }
}

#[test]
fn a_library_that_finds_nothing_says_why() {
    if opened() {
        return;
    }
    let open = |name: &str, list: &str, variables: &[(&str, &str)]| {
        let libraries = Libraries::new(name);
        libraries.all_but("", list).open("a_library_that_finds_nothing_says_why", variables)
    };
    let said = open("kernel", "errno = ENOSYS; return 0;", &[]);
    says(&said, &["NoDevice", "the kernel has no user-space RDMA", "ib_uverbs"]);
    let said = open("empty", "*count = 0; return calloc(1, sizeof(void *));", &[]);
    if Path::new("/sys/class/infiniband").read_dir().is_ok_and(|mut list| list.next().is_some()) {
        says(&said, &["NoDevice", "install ibverbs-providers"]);
        let said = open("named", "*count = 0; return calloc(1, sizeof(void *));", &[("RDMAV_DRIVERS", "nosuch")]);
        says(&said, &["RDMAV_DRIVERS=nosuch"]);
    } else {
        says(&said, &["NoDevice", "the kernel has none"]);
    }
}
