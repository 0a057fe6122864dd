//! `ProviderChoice::Auto` in a process that can open only one of two devices, as in a container,
//! although the system lists both. libibverbs caches the devices that it has found, so this test is
//! alone in its process. `make test-rdma-full` runs it.
#![cfg(feature = "verbs")]

use std::fs;
use std::path::PathBuf;

use rdma_reactor::Reactor;
use rdma_reactor_tests::auto::{config, each_where_it_belongs, pair};
use rdma_reactor_tests::conformance::harness::with_watchdog;
use rdma_reactor_tests::device::{RXE, SIW};

/// Returns the path of the file by which processes open a device.
fn node(device: &str) -> PathBuf {
    let all = fs::read_dir("/sys/class/infiniband_verbs").expect("the kernel's list");
    let mut names = all.flatten().map(|entry| entry.file_name());
    let of = |name: &std::ffi::OsString| {
        let owner = PathBuf::from("/sys/class/infiniband_verbs").join(name).join("ibdev");
        fs::read_to_string(owner).is_ok_and(|owner| owner.trim() == device)
    };
    PathBuf::from("/dev/infiniband").join(names.find(of).expect("its node"))
}

/// Connections to the address of the hidden device use TCP. Connections to the address of the other device use that device.
#[test]
fn a_hidden_device_is_done_without() {
    with_watchdog("a_hidden_device_is_done_without", || {
        let (shown, hidden) = (node(&SIW.name()), PathBuf::from("/dev/hidden"));
        fs::rename(&shown, &hidden).expect("root, and one file system");
        let mut p = pair();
        p.server = Reactor::new(config()).expect("a reactor");
        assert_eq!(p.client.provider_name(), "verbs+iwarp");
        let devices = [
            (RXE.address().ip(), RXE.name()),
            (SIW.address().ip(), "iwarp0".to_owned()),
            ([127, 0, 0, 1].into(), "iwarp0".to_owned()),
        ];
        each_where_it_belongs(p, &devices);
        fs::rename(hidden, shown).expect("it was there");
    });
}
