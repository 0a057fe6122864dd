//! The guide: the pages of the folder `docs` of the repository, in the order in which the author of a program needs them. Their code
//! examples are compiled and run as tests.
//!
//! 1. The first program: see the README
//! 2. [The loop and its promises](the_loop)
//! 3. [Flow control](flow_control): what to do when a send is refused
//! 4. [Remote memory](remote_memory): regions, reads, writes and atomics
//! 5. [Transfers](transfers): lists of reads or writes that end together
//! 6. [Landing places](landing): how to receive large messages in your own memory
//! 7. [Calls](calls): requests with a deadline, each of which ends with one answer or one error
//! 8. [Stopping](stopping): five ways to stop, and the effects of each
//! 9. [Errors and reasons](errors): the cause and the remedy of each
//! 10. [Settings](settings): features, presets, and what programs change
//! 11. [Security](security): authentication, encryption, and the guarantees of both
//! 12. [A reactor in another event loop](embedding), and other descriptors in a reactor's loop
//! 13. async/await: the page `async_await`, with the feature `async`
//! 14. [Coming from sockets, from ibverbs, from UCX](coming_from)
//! 15. [Testing without hardware](testing)
//! 16. [Providers](providers): what carries connections, and what works on each
//! 17. [Devices](hardware): which tests ran on which devices, and how to test yours
//! 18. [Performance](performance), and [Scaling](scaling): the cost of many connections
//! 19. [Peers of the same host](same_host): connections in shared memory
//! 20. Datagrams: the page `datagrams`, with the feature `datagram`
//! 21. [Connecting by exchange](exchange): how to connect over TCP, without rdma_cm
//! 22. [Writing a provider](writing_a_provider) of your own
//!
//! For the authors of this library: [the architecture](architecture), whose index has links to the pages about its parts, and [the wire
//! protocol](wire).

// At its end, each page defines the targets of its links, as Markdown link definitions. These targets are files, but in rustdoc the links
// must lead to modules. If Markdown has two definitions of one label, it uses the first. So each module below defines the labels before it
// includes the page. Labels of pictures are defined as an empty image, and the module includes the pictures after the page. The test
// `tests/tests/links.rs` checks the definitions and the pictures.

#[doc = "[bounds.md]: self::bounds"]
#[doc = "[checks.md]: self::checks"]
#[doc = "[connecting.md]: self::connecting"]
#[doc = "[credits.md]: self::credits"]
#[doc = "[datagram-endpoints.md]: self::datagram_endpoints"]
#[doc = "[embedded-provider.md]: self::embedded_provider"]
#[doc = "[ending.md]: self::ending"]
#[doc = "[large-messages.md]: self::large_messages"]
#[doc = "[layers.md]: self::layers"]
#[doc = "[loop.md]: self::the_loop"]
#[doc = "[ownership.md]: self::ownership"]
#[doc = "[reliability.md]: self::reliability"]
#[doc = "[same-host.md]: self::same_host"]
#[doc = "[secured-connections.md]: self::secured_connections"]
#[doc = "[security.md]: self::security"]
#[doc = "[shared-receives.md]: self::shared_receives"]
#[doc = "[testing.md]: self::testing"]
#[doc = "[verbs-provider.md]: self::verbs_provider"]
#[doc = "[waits.md]: self::waits"]
#[doc = "[walks.md]: self::walks"]
#[doc = "[wire.md]: self::wire"]
#[doc = "[writing-a-provider.md]: self::writing_a_provider"]
#[doc = ""]
#[doc = include_str!("../docs/architecture.md")]
pub mod architecture {}
#[cfg(feature = "async")]
#[doc = "[calls.md]: self::calls"]
#[doc = "[stopping.md]: self::stopping"]
#[doc = ""]
#[doc = include_str!("../docs/guide/async.md")]
pub mod async_await {}
#[doc = "[wire.md]: self::wire"]
#[doc = ""]
#[doc = include_str!("../docs/guide/calls.md")]
pub mod calls {}
#[doc = "[exchange.md]: self::exchange"]
#[doc = ""]
#[doc = include_str!("../docs/guide/coming-from.md")]
pub mod coming_from {}
#[cfg(feature = "datagram")]
#[doc = "[wire.md]: self::wire"]
#[doc = ""]
#[doc = include_str!("../docs/guide/datagrams.md")]
pub mod datagrams {}
#[doc = "[guide/stopping.md]: self::stopping"]
#[doc = "[loop.md#several-reactors]: self::the_loop#several-reactors"]
#[doc = ""]
#[doc = include_str!("../docs/embedding.md")]
pub mod embedding {}
#[doc = include_str!("../docs/guide/errors.md")]
pub mod errors {}
#[doc = include_str!("../docs/guide/flow-control.md")]
pub mod flow_control {}
#[doc = "[verbs-provider.md]: self::verbs_provider"]
#[doc = "[guide/exchange.md]: self::exchange"]
#[doc = ""]
#[doc = include_str!("../docs/hardware.md")]
pub mod hardware {}
#[doc = include_str!("../docs/guide/landing.md")]
pub mod landing {}
#[doc = "[connections.svg]: data:image/gif;base64,R0lGODlhAQABAAAAACwAAAAAAQABAAA="]
#[doc = "[latency.svg]: data:image/gif;base64,R0lGODlhAQABAAAAACwAAAAAAQABAAA="]
#[doc = "[scaling.md#cost-of-a-connection]: self::scaling#cost-of-a-connection"]
#[doc = ""]
#[doc = include_str!("../docs/performance.md")]
#[doc = "\n## Pictures\n"]
#[doc = "\n**Half round trip by size, logarithmic**\n"]
#[doc = include_str!("../docs/latency.svg")]
#[doc = "\n**Echoes per second by connections, logarithmic**\n"]
#[doc = include_str!("../docs/connections.svg")]
pub mod performance {}
#[doc = "[exchange.md]: self::exchange"]
#[doc = "[hardware.md]: self::hardware"]
#[doc = "[same-host.md]: self::same_host"]
#[doc = "[security.md]: self::security"]
#[doc = ""]
#[doc = include_str!("../docs/guide/providers.md")]
pub mod providers {}
#[doc = "[transfers.md]: self::transfers"]
#[doc = ""]
#[doc = include_str!("../docs/guide/remote-memory.md")]
pub mod remote_memory {}
#[doc = "[testing.md#fuzzing]: self::testing#fuzzing"]
#[doc = ""]
#[doc = include_str!("../docs/reliability.md")]
pub mod reliability {}
#[doc = "[datagrams.md]: self::datagrams"]
#[doc = "[wire.md]: self::wire"]
#[doc = ""]
#[doc = include_str!("../docs/guide/same-host.md")]
pub mod same_host {}
#[doc = "[security.md]: self::security"]
#[doc = "[wire.md]: self::wire"]
#[doc = ""]
#[doc = include_str!("../docs/guide/exchange.md")]
pub mod exchange {}
#[doc = "[mesh.svg]: data:image/gif;base64,R0lGODlhAQABAAAAACwAAAAAAQABAAA="]
#[doc = ""]
#[doc = include_str!("../docs/scaling.md")]
#[doc = "\n## Picture\n"]
#[doc = "\n**Latency and bandwidth between eight ranks**\n"]
#[doc = include_str!("../docs/mesh.svg")]
pub mod scaling {}
#[doc = "[stops-the-loop]: self::same_host#a-peer-that-stops-the-loop"]
#[doc = ""]
#[doc = include_str!("../docs/security.md")]
pub mod security {}
#[doc = "[async.md]: self::async_await"]
#[doc = "[calls.md]: self::calls"]
#[doc = "[datagrams.md]: self::datagrams"]
#[doc = "[exchange.md]: self::exchange"]
#[doc = "[providers.md]: self::providers"]
#[doc = "[scaling.md]: self::scaling"]
#[doc = "[security.md]: self::security"]
#[doc = ""]
#[doc = include_str!("../docs/guide/settings.md")]
pub mod settings {}
#[doc = include_str!("../docs/guide/stopping.md")]
pub mod stopping {}
#[doc = "[layers.md]: self::layers"]
#[doc = "[walks.md]: self::walks"]
#[doc = "[writing-a-provider.md]: self::writing_a_provider"]
#[doc = ""]
#[doc = include_str!("../docs/testing.md")]
pub mod testing {}
#[doc = "[turn.svg]: data:image/gif;base64,R0lGODlhAQABAAAAACwAAAAAAQABAAA="]
#[doc = ""]
#[doc = include_str!("../docs/loop.md")]
#[doc = "\n## Picture\n"]
#[doc = "\n**One turn**\n"]
#[doc = include_str!("../docs/turn.svg")]
pub mod the_loop {}
#[doc = include_str!("../docs/guide/transfers.md")]
pub mod transfers {}
#[doc = "[guide/exchange.md]: self::exchange"]
#[doc = ""]
#[doc = include_str!("../docs/wire.md")]
pub mod wire {}
#[doc = include_str!("../docs/writing-a-provider.md")]
pub mod writing_a_provider {}

// The pages to which the page `architecture` links.

#[doc = include_str!("../docs/design/bounds.md")]
pub mod bounds {}
#[doc = "[bounds.md]: self::bounds"]
#[doc = "[security.md]: self::security"]
#[doc = ""]
#[doc = include_str!("../docs/design/checks.md")]
pub mod checks {}
#[doc = "[connect.svg]: data:image/gif;base64,R0lGODlhAQABAAAAACwAAAAAAQABAAA="]
#[doc = "[secured-connections.md]: self::secured_connections"]
#[doc = "[wire.md]: self::wire"]
#[doc = ""]
#[doc = include_str!("../docs/design/connecting.md")]
#[doc = "\n## Picture\n"]
#[doc = "\n**From connecting to both `on_connect`**\n"]
#[doc = include_str!("../docs/connect.svg")]
pub mod connecting {}
#[doc = "[credit.svg]: data:image/gif;base64,R0lGODlhAQABAAAAACwAAAAAAQABAAA="]
#[doc = "[flow-control.md]: self::flow_control"]
#[doc = "[waits.md]: self::waits"]
#[doc = "[wire.md]: self::wire"]
#[doc = ""]
#[doc = include_str!("../docs/design/credits.md")]
#[doc = "\n## Picture\n"]
#[doc = "\n**The life of a credit**\n"]
#[doc = include_str!("../docs/credit.svg")]
pub mod credits {}
#[doc = "[datagrams.md]: self::datagrams"]
#[doc = ""]
#[doc = include_str!("../docs/design/datagram-endpoints.md")]
pub mod datagram_endpoints {}
#[doc = "[datagrams.md]: self::datagrams"]
#[doc = ""]
#[doc = include_str!("../docs/design/embedded-provider.md")]
pub mod embedded_provider {}
#[doc = "[loop.md]: self::the_loop"]
#[doc = "[stopping.md]: self::stopping"]
#[doc = ""]
#[doc = include_str!("../docs/design/ending.md")]
pub mod ending {}
#[doc = "[landing.md]: self::landing"]
#[doc = "[security.md]: self::security"]
#[doc = ""]
#[doc = include_str!("../docs/design/large-messages.md")]
pub mod large_messages {}
#[doc = "[embedded-provider.md]: self::embedded_provider"]
#[doc = "[verbs-provider.md]: self::verbs_provider"]
#[doc = "[writing-a-provider.md]: self::writing_a_provider"]
#[doc = ""]
#[doc = include_str!("../docs/design/layers.md")]
pub mod layers {}
#[doc = "[buffer.svg]: data:image/gif;base64,R0lGODlhAQABAAAAACwAAAAAAQABAAA="]
#[doc = ""]
#[doc = include_str!("../docs/design/ownership.md")]
#[doc = "\n## Picture\n"]
#[doc = "\n**The owners of a buffer**\n"]
#[doc = include_str!("../docs/buffer.svg")]
pub mod ownership {}
#[doc = include_str!("../docs/design/secured-connections.md")]
pub mod secured_connections {}
#[doc = include_str!("../docs/design/shared-receives.md")]
pub mod shared_receives {}
#[doc = include_str!("../docs/design/verbs-provider.md")]
pub mod verbs_provider {}
#[doc = "[testing.md]: self::testing"]
#[doc = ""]
#[doc = include_str!("../docs/design/waits.md")]
pub mod waits {}
#[doc = include_str!("../docs/design/walks.md")]
pub mod walks {}
